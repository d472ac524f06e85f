"""Running a graph block by block over calibration data: cuts, caches, ranks, resources, calibration."""
