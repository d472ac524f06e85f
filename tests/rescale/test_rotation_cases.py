"""Small models in which rotations have to stop, part, or go around something; each keeps its function."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_rotation_sites import ROUNDING, rotated
from tiny import rand, seeded
from torch import Tensor, nn
from zoo import Net, capture, difference, double_inputs, in_double, outputs

from quark_fx.graph.pass_manager import run_passes
from quark_fx.passes import fold_batch_norm, fold_constants

L = nn.Linear


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def repeated_under_a_norm(s: Any, x: Tensor) -> Tensor:
    x = s.i(x)
    z = torch.cat([x, x], -1)[..., :6]
    y: Tensor = s.o(x * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-3))
    return y


def heads_of_one_channel(s: Any, x: Tensor) -> Tensor:
    v, q = (layer(x).reshape(x.shape[0], 4, 6, 1).permute(0, 2, 1, 3) for layer in (s.v, s.q))
    y: Tensor = s.o(F.scaled_dot_product_attention(q, q + 1, v).permute(0, 2, 1, 3).reshape(x.shape[0], 4, 6))
    return y


def gates_of_split_runs(s: Any, x: Tensor) -> Tensor:
    y = s.i(x)
    z = torch.cat([y, s.w(x), y, s.u(x)], -1).reshape(x.shape[0], 3, 4) * s.g(x)[..., None]
    out: Tensor = s.o(z.flatten(1))
    return out


def joined_images(s: Any, x: Tensor) -> Tensor:
    y: Tensor = s.o(torch.cat([s.a(x).flatten(2).relu(), s.b(x).flatten(2)], 2).transpose(1, 2))
    return y


def cross_attention(s: Any, x: Tensor, z: Tensor) -> Tensor:
    pairs = ((s.q, x), (s.k, z), (s.v, z))
    q, k, v = (layer(t).reshape(t.shape[0], t.shape[1], 2, 4).transpose(1, 2) for layer, t in pairs)
    y: Tensor = x + s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return y


def grouped_queries(s: Any, x: Tensor) -> Tensor:
    q = s.q(x).reshape(x.shape[0], x.shape[1], 4, 4).transpose(1, 2)
    k, v = (layer(x).reshape(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) for layer in (s.k, s.v))
    y: Tensor = s.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
    return y


def branch(s: Any, x: Tensor) -> Tensor:
    y = x * 0.5
    out: Tensor = s.l(F.gelu(y)) + s.k(y)
    return out


def branch_and_residual(s: Any, x: Tensor) -> Tensor:
    out: Tensor = s.l(F.gelu(x * 0.5)) + x
    return out


def sharing_a_bias() -> nn.Module:
    model: Any = Net(lambda s, x: s.o(s.a(x)) + s.p(s.b(x)), a=L(5, 8), b=L(5, 8), o=L(8, 3), p=L(8, 3))
    model.b.bias = model.a.bias
    return model  # type: ignore[no-any-return]


def sharing_a_factor() -> nn.Module:
    layers = {"i": L(5, 8), "j": L(5, 8), "o": L(8, 3), "p": L(8, 3), "n": nn.LayerNorm(8), "m": nn.LayerNorm(8)}
    model: Any = Net(lambda s, x: s.o(s.n(s.i(x))) + s.p(s.m(s.j(x))), **layers)
    model.m.weight = model.n.weight
    return model  # type: ignore[no-any-return]


X = rand(2, 4, 5)
IMAGES = rand(2, 3, 4, 4)

# fmt: off
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "maxpool": (lambda: Net(lambda s, x: s.b(F.max_pool2d(s.a(x),2)), a=nn.Conv2d(3,8,1), b=nn.Conv2d(8,4,1)), rand(2,3,4,4)),
    "pow mean tokens": (lambda: Net(lambda s, x: s.a(x.pow(2).mean(1)), a=L(8,4)), rand(2,5,8)),
    "x*x mean tokens": (lambda: Net(lambda s, x: s.a((x*x).mean(1)), a=L(8,4)), rand(2,5,8)),
    "pow sum, labelled x too": (lambda: Net(lambda s, x: s.a(s.b(x).pow(2).mean(1)), a=L(8,4),b=L(6,8)), rand(2,5,6)),
    "scalar param added": (lambda: Net(lambda s, x: s.o(s.i(x)+s.c), i=L(5,8),o=L(8,3),c=param(1)), rand(2,5)),
    "bool mask product": (lambda: Net(lambda s, x: s.o((y:=s.i(x))*(y>0)), i=L(5,8),o=L(8,3)), rand(2,5)),
    "factor (T,C)": (lambda: Net(lambda s, x: s.o(s.i(x)*s.c), i=L(5,8),o=L(8,3),c=param(4,8)), rand(2,4,5)),
    "norm then plain rms": (lambda: Net(lambda s, x: s.o(F.rms_norm(s.n(s.i(x)),(8,))), i=L(5,8),o=L(8,3),n=nn.RMSNorm(8)), rand(2,4,5)),
    "norm then plain layernorm": (lambda: Net(lambda s, x: s.o(F.layer_norm(s.n(s.i(x)),(8,))), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm*0.5 into bias": (lambda: Net(lambda s, x: s.o(s.n(s.i(x))*0.5), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm sum tokens into bias": (lambda: Net(lambda s, x: s.o(s.n(s.i(x)).sum(1)), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm*gate into bias": (lambda: Net(lambda s, x: s.o(s.n(s.i(x))*s.g(x).sigmoid()), i=L(5,8),o=L(8,3),g=L(5,1),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm pad tokens": (lambda: Net(lambda s, x: s.o(F.pad(s.n(s.i(x)),(0,0,1,1))), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm flip": (lambda: Net(lambda s, x: s.o(s.n(s.i(x)).flip(-1)), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm slice": (lambda: Net(lambda s, x: s.o(s.n(s.i(x))[...,:4]), i=L(5,8),o=L(4,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm cat self": (lambda: Net(lambda s, x: s.o(torch.cat([y:=s.n(s.i(x)),y],-1)), i=L(5,8),o=L(16,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm mean-merged patches": (lambda: Net(lambda s, x: s.o(s.n(s.i(x)).reshape(x.shape[0],2,16)), i=L(5,8),o=L(16,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "norm attn-mixed": (lambda: Net(lambda s, x: s.o(torch.matmul(s.g(x), s.n(s.i(x)))), i=L(5,8),o=L(8,3),g=L(5,4),n=nn.LayerNorm(8)), rand(2,4,5)),
    "shared token const": (lambda: Net(lambda s, x: (s.o(torch.cat([s.t,s.i(x)])).sum(0), s.p(torch.cat([s.t,s.j(x)])).sum(0)), i=L(5,8),j=L(5,8),o=L(8,3),p=L(8,3),t=param(2,8)), rand(4,5)),
    "sdpa(x,x,x)": (lambda: Net(lambda s, x: s.o(F.scaled_dot_product_attention(y:=s.i(x),y,y)), i=L(5,8),o=L(8,3)), rand(2,4,5)),
    "sdpa(q,x,x)": (lambda: Net(lambda s, x: s.o(F.scaled_dot_product_attention(s.q(x),y:=s.i(x),y)), i=L(5,8),q=L(5,8),o=L(8,3)), rand(2,4,5)),
    "matmul(x,x)": (lambda: Net(lambda s, x: s.o(torch.matmul(y:=s.i(x),y)), i=L(5,4),o=L(4,3)), rand(2,4,5)),
    "gather per channel": (lambda: Net(lambda s, x,i: s.o(s.i(x).gather(1,i)), i=L(5,8),o=L(8,3)), (rand(2,4,5), torch.randint(4,(2,3,8)))),
    "roll": (lambda: Net(lambda s, x: s.o(s.i(x).roll(1,-1).reshape(x.shape[0],2,4)), i=L(5,8),o=L(4,3)), rand(2,5)),
    "addmm beta/alpha": (lambda: Net(lambda s, x: s.o(torch.addmm(s.b, s.i(x), s.w, alpha=2., beta=3.)), i=L(5,8),o=L(6,3),w=param(8,6),b=param(6)), rand(2,5)),
    "addmm bias (1,)": (lambda: Net(lambda s, x: s.o(torch.addmm(s.b, s.i(x), s.w)), i=L(5,8),o=L(6,3),w=param(8,6),b=param(1)), rand(2,5)),
    "addmm bias (T,1)": (lambda: Net(lambda s, x: s.o(torch.addmm(s.b, x, s.w).t()), o=L(4,3),w=param(5,6),b=param(4,1)), rand(4,5)),
    "addmm bias (T,1) b": (lambda: Net(lambda s, x: s.o(torch.addmm(s.b, s.i(x), s.w).reshape(1,24)), i=L(5,8),o=L(24,3),w=param(8,6),b=param(4,1)), rand(4,5)),
    "addmm norm bias 2d": (lambda: Net(lambda s, x: torch.addmm(s.b, s.n(s.i(x)), s.w), i=L(5,8),n=nn.LayerNorm(8),w=param(8,6),b=param(4,6)), rand(4,5)),
    "addmm norm bias (1,6)": (lambda: Net(lambda s, x: torch.addmm(s.b, s.n(s.i(x)), s.w), i=L(5,8),n=nn.LayerNorm(8),w=param(8,6),b=param(1,6)), rand(4,5)),
    "addmm norm bias (1,)": (lambda: Net(lambda s, x: torch.addmm(s.b, s.n(s.i(x)), s.w), i=L(5,8),n=nn.LayerNorm(8),w=param(8,6),b=param(1)), rand(4,5)),
    "residual joins two sizes": (lambda: Net(lambda s, x: s.o(torch.cat([s.i(x),s.j(x)],-1))+s.p(s.i(x)), i=L(5,8),j=L(5,4),o=L(12,3),p=L(8,3)), rand(2,5)),
    "norm over two sizes": (lambda: Net(lambda s, x: s.o(s.n(torch.cat([s.i(x),s.j(x)],-1)))+s.p(s.i(x)), i=L(5,8),j=L(5,4),o=L(12,3),p=L(8,3),n=nn.LayerNorm(12)), rand(2,5)),
    "shared norm module": (lambda: Net(lambda s, x: s.o(s.n(s.i(x)))+s.p(s.n(s.j(x))), i=L(5,8),j=L(5,8),o=L(8,3),p=L(8,3),n=nn.LayerNorm(8)), rand(2,5)),
    "two norms, one value": (lambda: Net(lambda s, x: s.o(s.n(y:=s.i(x)))+s.p(s.m(y)), i=L(5,8),o=L(8,3),p=L(8,3),n=nn.LayerNorm(8),m=nn.RMSNorm(8)), rand(2,5)),
    "output and read": (lambda: Net(lambda s, x: ((y:=s.i(x)), s.o(y)), i=L(5,8),o=L(8,3)), rand(2,5)),
    "norm out is output": (lambda: Net(lambda s, x: ((y:=s.n(s.i(x))), s.o(y)), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,5)),
    "norm+residual of itself": (lambda: Net(lambda s, x: s.o((y:=s.i(x))+s.n(y)), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,5)),
    "norm twice": (lambda: Net(lambda s, x: s.o(s.m(s.n(s.i(x)))), i=L(5,8),o=L(8,3),n=nn.RMSNorm(8),m=nn.RMSNorm(8)), rand(2,5)),
    "same linear twice": (lambda: Net(lambda s, x: s.i(s.i(x)), i=L(8,8)), rand(2,8)),
    "const twice": (lambda: Net(lambda s, x: s.o(s.i(x)*s.c*s.c), i=L(5,8),o=L(8,3),c=param(8)), rand(2,5)),
    "const mul then pow-norm": (lambda: Net(lambda s, x: s.o((y:=s.i(x)*s.c)*torch.rsqrt((y*y).mean(-1,keepdim=True)+.1)), i=L(5,8),o=L(8,3),c=param(8)), rand(2,5)),
    "layerscale residual": (lambda: Net(lambda s, x: s.o((y:=s.i(x))+s.c*s.k(y)), i=L(5,8),k=L(8,8),o=L(8,3),c=param(8)), rand(2,5)),
    "MLA absorbed: matmul of stored weight left": (lambda: Net(lambda s, x: s.o(torch.matmul(s.w, s.i(x))), i=L(5,8),w=param(3,4),o=L(8,2)), rand(2,4,5)),
    "stacked bmm": (lambda: Net(lambda s, x: s.o(torch.bmm(torch.bmm(s.i(x),s.w),s.v)), i=L(5,8),w=param(3,8,6),v=param(3,6,4),o=L(4,2)), rand(3,4,5)),
    "stacked matmul of one x": (lambda: Net(lambda s, x: s.o(torch.matmul(s.i(x),s.w).sum(0)), i=L(5,8),w=param(3,8,6),o=L(6,2)), rand(4,5)),
    "norm, stacked": (lambda: Net(lambda s, x: torch.matmul(s.n(s.i(x)),s.w), i=L(5,8),w=param(3,8,6),n=nn.LayerNorm(8)), rand(4,5)),
    "weight read via t twice": (lambda: Net(lambda s, x: F.linear(torch.matmul(x,s.w),s.w), w=param(5,8)), rand(4,5)),
    "embedding tied via t": (lambda: Net(lambda s, x: torch.matmul(s.k(F.embedding(x,s.w)),s.w.t()), w=param(11,8),k=L(8,8)), torch.randint(11,(2,3))),
    "conv1x1": (lambda: Net(lambda s, x: s.b(s.a(x))+s.c(s.a(x)), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,3,padding=1),c=nn.Conv2d(8,4,1)), rand(2,3,4,4)),
    "conv1x1 channelnorm": (lambda: Net(lambda s, x: s.b(s.n(s.a(x).permute(0,2,3,1)).permute(0,3,1,2)), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,3,padding=1),n=nn.LayerNorm(8)), rand(2,3,4,4)),
    "groupnorm": (lambda: Net(lambda s, x: s.b(s.n(s.a(x))), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,3,padding=1),n=nn.GroupNorm(2,8)), rand(2,3,4,4)),
    "instance norm": (lambda: Net(lambda s, x: s.b(s.n(s.a(x))), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,3,padding=1),n=nn.InstanceNorm2d(8)), rand(2,3,4,4)),
    "layernorm over space": (lambda: Net(lambda s, x: s.b(F.layer_norm(s.a(x),(4,))), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,1)), rand(2,3,4,4)),
    "layernorm over space affine": (lambda: Net(lambda s, x: s.b(s.n(s.a(x))), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,1),n=nn.LayerNorm(4)), rand(2,3,4,4)),
    "conv transpose": (lambda: Net(lambda s, x: s.b(s.a(x)), a=nn.ConvTranspose2d(3,8,2,stride=2),b=nn.ConvTranspose2d(8,4,2,stride=2)), rand(2,3,4,4)),
    "upsample bilinear": (lambda: Net(lambda s, x: s.b(F.interpolate(s.a(x),scale_factor=2,mode='nearest')), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,1)), rand(2,3,4,4)),
    "avgpool ceil": (lambda: Net(lambda s, x: s.b(F.avg_pool2d(s.a(x),3,2,ceil_mode=True)), a=nn.Conv2d(3,8,1),b=nn.Conv2d(8,4,1)), rand(2,3,5,5)),
    "add constant (T,1)": (lambda: Net(lambda s, x: s.o(s.i(x)+s.c), i=L(5,8),o=L(8,3),c=param(4,1)), rand(2,4,5)),
    "add (1,8)": (lambda: Net(lambda s, x: s.o(s.i(x)+s.c), i=L(5,8),o=L(8,3),c=param(1,8)), rand(2,4,5)),
    "add const alpha": (lambda: Net(lambda s, x: s.o(torch.add(s.i(x),s.c,alpha=2.)), i=L(5,8),o=L(8,3),c=param(8)), rand(2,4,5)),
    "c - x": (lambda: Net(lambda s, x: s.o(s.c-s.i(x)), i=L(5,8),o=L(8,3),c=param(8)), rand(2,4,5)),
    "const cat T": (lambda: Net(lambda s, x: s.o(torch.cat([s.t.expand(x.shape[0],-1,-1),s.i(x)],1)), i=L(5,8),o=L(8,3),t=param(1,1,8)), rand(3,4,5)),
    "stack heads cat back": (lambda: Net(lambda s, x: s.o(torch.cat([s.i(x)[...,4:],s.i(x)[...,:4]],-1)), i=L(5,8),o=L(8,3)), rand(3,4,5)),
    "complex norm: x - mean": (lambda: Net(lambda s, x: s.o((y:=s.i(x))-y.mean(-1,keepdim=True)), i=L(5,8),o=L(8,3)), rand(3,4,5)),
    "softmax over tokens": (lambda: Net(lambda s, x: s.o(s.i(x).softmax(1)), i=L(5,8),o=L(8,3)), rand(3,4,5)),
    "F.normalize": (lambda: Net(lambda s, x: s.o(F.normalize(s.i(x),dim=-1)), i=L(5,8),o=L(8,3)), rand(3,4,5)),
    "F.normalize dim1": (lambda: Net(lambda s, x: s.o(F.normalize(s.i(x),dim=1)), i=L(5,8),o=L(8,3)), rand(3,4,5)),
    "einsum": (lambda: Net(lambda s, x: s.o(torch.einsum('btc,cd->btd',s.i(x),s.w)), i=L(5,8),o=L(6,3),w=param(8,6)), rand(3,4,5)),
    "norm fp16 cast": (lambda: Net(lambda s, x: s.o(s.n(s.i(x)).to(torch.float64).float()), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(3,4,5)),
    "norm added twice": (lambda: Net(lambda s, x: s.o((y:=s.n(s.i(x)))+y), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(3,4,5)),
    "norm neg": (lambda: Net(lambda s, x: s.o(-s.n(s.i(x))), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(3,4,5)),
    "norm attention value, no proj": (lambda: Net(lambda s, x: s.o(F.scaled_dot_product_attention(s.q(x),s.q(x),s.n(s.i(x)))), q=L(5,8),i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(3,4,5)),
    "moe gather": (lambda: Net(lambda s, x: s.o(s.i(x)[torch.topk(s.g(x).squeeze(-1),2,dim=0).indices]), i=L(5,8),g=L(5,1),o=L(8,3)), rand(4,5)),
    "maxpool1d": (lambda: Net(lambda s, x: s.b(F.max_pool1d(s.a(x),2)), a=nn.Conv1d(3,8,1), b=nn.Conv1d(8,4,1)), rand(2,3,4)),
    "adaptive max": (lambda: Net(lambda s, x: s.b(F.adaptive_max_pool2d(s.a(x),2)), a=nn.Conv2d(3,8,1), b=nn.Conv2d(8,4,1)), rand(2,3,4,4)),
    "add same read": (lambda: Net(lambda s, x: s.o((y:=s.i(x))+y.tanh()), i=L(5,8),o=L(8,3)), rand(2,4,5)),
    "index by tensor of two dims": (lambda: Net(lambda s, x: s.o(s.i(x)[torch.tensor([0,1]),:,torch.tensor([1,2])]), i=L(5,8),o=L(4,3)), rand(2,4,5)),
    "bias is activation": (lambda: Net(lambda s, x: s.o(torch.addmm(s.j(x),s.i(x),s.w,beta=2.)), i=L(5,8),j=L(5,6),w=param(8,6),o=L(6,3)), rand(4,5)),
    "bias is activation bcast": (lambda: Net(lambda s, x: s.o(torch.addmm(s.j(x),s.i(x),s.w)), i=L(5,8),j=L(5,1),w=param(8,6),o=L(6,3)), rand(4,5)),
    "one-row sdpa D const": (lambda: Net(lambda s, x: s.o(torch.matmul(s.g(x).reshape(x.shape[0],4,3,4).softmax(-1), s.v(x).reshape(x.shape[0],4,4,1)).flatten(1)), g=L(5,48),v=L(5,16),o=L(12,3)), rand(2,5)),
    "1-d input": (lambda: Net(lambda s, x: s.o(s.i(x)), i=L(5,8),o=L(8,3)), rand(5)),
    "size-1 tokens factor param (1,8) with T": (lambda: Net(lambda s, x: s.o(s.i(x)*s.c), i=L(5,8),o=L(8,3),c=param(1,1,8)), rand(2,4,5)),
    "factor (B,1) broadcasting up": (lambda: Net(lambda s, x: s.o(s.i(x)*s.c), i=L(5,8),o=L(8,3),c=param(4,1,8)), rand(3,5)),
    "gemma norm 1+w folded": (lambda: Net(lambda s, x: s.o(F.rms_norm(s.i(x),(8,))*(1+s.c)), i=L(5,8),o=L(8,3),c=param(8)), rand(2,4,5)),
    "layernorm affine heads": (lambda: Net(lambda s, x: s.o(s.n(s.i(x).unflatten(-1,(2,4))).flatten(-2)), i=L(5,8),o=L(8,3),n=nn.LayerNorm(4)), rand(2,4,5)),
    "qk-norm style v norm": (lambda: Net(lambda s, x: s.o(F.rms_norm(s.i(x).unflatten(-1,(2,4)),(4,)).flatten(-2)), i=L(5,8),o=L(8,3)), rand(2,4,5)),
    "groups conv1d after": (lambda: Net(lambda s, x: s.b(s.a(x)), a=nn.Conv1d(3,8,1), b=nn.Conv1d(8,4,1,groups=2)), rand(2,3,4)),
    "mean keepdim add": (lambda: Net(lambda s, x: s.o((y:=s.i(x))-y.mean(1,keepdim=True)), i=L(5,8),o=L(8,3)), rand(2,4,5)),
    "square through pow labelled (heads)": (lambda: Net(lambda s, x: s.o(s.i(x).unflatten(-1,(4,2)).pow(2).sum(-1)), i=L(5,8),o=L(4,3)), rand(2,4,5)),
    "mixed keep_apart sdpa kv shared in heads": (lambda: Net(lambda s, x: s.o(torch.matmul(s.g(x).reshape(x.shape[0],3,4,4), s.i(x)[:,None]).flatten(2)), g=L(5,12),i=L(5,8),o=L(32,3)), rand(2,4,5)),
    "roll tokens of channels": (lambda: Net(lambda s, x: s.o(s.i(x).roll(1,1)), i=L(5,8),o=L(8,3)), rand(2,4,5)),
    "pixel shuffle": (lambda: Net(lambda s, x: s.b(F.pixel_shuffle(s.a(x),2)), a=nn.Conv2d(3,16,1), b=nn.Conv2d(4,3,1)), rand(2,3,4,4)),
    "pixel unshuffle": (lambda: Net(lambda s, x: s.b(F.pixel_unshuffle(s.a(x),2)), a=nn.Conv2d(3,4,1), b=nn.Conv2d(16,3,1)), rand(2,3,4,4)),
    "reflected windows": (lambda: Net(lambda s, x: s.b(F.pad(s.a(x),(1,1,1,1),'reflect').unfold(3,2,1).diagonal(0,2,3).transpose(2,3)), a=nn.Conv2d(3,8,1), b=nn.Conv2d(8,3,1)), rand(2,3,4,4)),
    "unflatten (4,2) transposed": (lambda: Net(lambda s, x: s.o(s.i(x).unflatten(-1,(4,2)).transpose(1,2)), i=L(5,8),o=L(4,3)), rand(2,5)),
    "kv same MQA": (lambda: Net(lambda s, x: s.o(torch.matmul((torch.matmul(s.q(x),(c:=s.c(x)).transpose(1,2))).softmax(-1),c)), q=L(5,8),c=L(5,8),o=L(8,3)), rand(2,4,5)),
    "multi-query sdpa same kv": (lambda: Net(lambda s, x: s.o(F.scaled_dot_product_attention(s.q(x), s.c(x), s.c2(x))), q=L(5,8),c=L(5,8),c2=L(5,8),o=L(8,3)), rand(2,4,5)),
    "muP scale behind final norm": (lambda: Net(lambda s, x: s.o(s.n(s.i(x))/4), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "mask multiply float tokens": (lambda: Net(lambda s, x,m: s.o(s.n(s.i(x))*m[...,None]), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), (rand(2,4,5),torch.tensor([[1.,1,0,0],[1,1,1,0]]))),
    "mask multiply int tokens mean pooling": (lambda: Net(lambda s, x,m: s.o((s.n(s.i(x))*m[...,None]).sum(1)/m.sum(1,keepdim=True)), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), (rand(2,4,5),torch.tensor([[1.,1,0,0],[1,1,1,0]]))),
    "norm, zero-pad via constant_pad": (lambda: Net(lambda s, x: s.o(torch.ops.aten.constant_pad_nd(s.n(s.i(x)),[0,0,1,1])), i=L(5,8),o=L(8,3),n=nn.LayerNorm(8)), rand(2,4,5)),
    "bool dropout mask per channel": (lambda: Net(lambda s, x,m: s.o(s.i(x)*m), i=L(5,8),o=L(8,3)), (rand(2,4,5),torch.tensor([1,0,1,1,0,1,1,1]).bool())),
    "clamped relu by hand": (lambda: Net(lambda s, x: s.o((y:=s.i(x))*(y>0)), i=L(5,8),o=L(8,3)), rand(2,4,5)),
    "repeated under a norm": (lambda: Net(repeated_under_a_norm, i=L(5,4), o=L(4,3)), rand(2,3,5)),
    "heads of one channel": (lambda: Net(heads_of_one_channel, v=L(5,6), q=L(5,6), o=L(6,3)), X),
    "gates of split runs": (lambda: Net(gates_of_split_runs, i=L(5,4), w=L(5,2), u=L(5,2), g=L(5,3), o=L(12,3)), rand(2,5)),
    "joined images": (lambda: Net(joined_images, a=nn.Conv2d(3,8,1), b=nn.Conv2d(3,8,1), o=L(8,3)), IMAGES),
    "cross attention": (lambda: Net(cross_attention, q=L(8,8), k=L(6,8), v=L(6,8), o=L(8,8)), (rand(2,3,8), rand(2,5,6))),
    "grouped queries": (lambda: Net(grouped_queries, q=L(8,16), k=L(8,8), v=L(8,8), o=L(16,8)), rand(2,3,8)),
    "a second reader within": (lambda: Net(lambda s, x: s.o(s.b(s.i(x))), i=L(5,8), o=L(8,3), b=Net(branch, l=L(8,8), k=L(8,8))), X),
    "a residual within": (lambda: Net(lambda s, x: s.o(s.b(s.i(x))), i=L(5,8), o=L(8,3), b=Net(branch_and_residual, l=L(8,8))), X),
    "what is made and read back by all": (lambda: Net(lambda s, x: s.o(y := s.i(x)) + s.p(F.gelu(y + s.c)) + F.gelu(s.c[:3]), i=L(5,8), o=L(8,3), p=L(8,3), c=param(8)), X),
    "shared bias": (sharing_a_bias, X),
    "shared factor": (sharing_a_factor, rand(2,5)),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_rotating_keeps_the_function(name: str) -> None:
    make, batch = CASES[name]
    gm, _ = run_passes(capture(seeded(make()), batch), [fold_batch_norm, fold_constants])
    gm = in_double(gm)
    inputs = double_inputs(batch)
    assert difference(outputs(gm, inputs), outputs(rotated(gm), inputs)) < ROUNDING
