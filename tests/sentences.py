"""English sentences on many subjects and of many lengths: half to calibrate a text encoder, half to judge it."""

CALIBRATION = """
The train to the coast leaves at seven and takes a little under three hours.
Boil the pasta until it is firm, then finish it in the pan with the sauce.
Our quarterly revenue rose by eleven percent, mostly because of the new subscriptions.
Why does the moon look larger near the horizon?
Please restart the server after you have changed the configuration file.
She tuned her violin, nodded to the conductor and began to play.
Water expands when it freezes, which is why pipes burst in winter.
The goalkeeper saved two penalties and was carried off the field by the fans.
No.
Interest rates will stay where they are, the central bank announced on Thursday.
A hash table stores keys and values and finds them in constant time on average.
My grandmother kept bees behind the house and sold honey at the market.
Turn left at the old mill, cross the bridge, and you will see the church.
The patient complained of headaches and was given a mild painkiller.
Photosynthesis turns carbon dioxide and water into sugar and oxygen.
Do you have this jacket in a smaller size?
The committee rejected the proposal by nine votes to four.
He painted the same hill every morning for twenty years.
Volcanic ash closed the airport for six days in April.
If the test fails, read the message first and the source second.
Whales sing songs that change slowly from one year to the next.
The contract ends on the last day of March unless both parties agree to extend it.
I lost my keys again, probably in the taxi.
Glass is made of sand, soda and lime.
The museum is closed on Mondays, except in August.
Two trains collided outside the station, but nobody was seriously hurt.
It was raining so hard that the players could not see the ball.
Machine translation has become useful for everyday letters.
An octopus has three hearts and blue blood.
Sort the list before you search it, or use a set.
The actress thanked her parents, her agent and her dog.
Prices of wheat fell after a good harvest in the south.
Happy birthday!
The bridge was built by the Romans and repaired in the fifteenth century.
He speaks Finnish at home, Swedish at work and English on the telephone.
Add two eggs, a pinch of salt and a cup of flour.
The satellite lost contact with the ground shortly after it was launched.
Children under twelve travel free with an adult.
Sound travels faster in water than in air.
This chair is lighter than it looks.
Our neighbors complained about the noise of the party until well past midnight.
Vaccines train the immune system without causing the disease.
The novel begins with a funeral and ends with a wedding.
Could you send me the slides before the meeting on Friday?
The glacier has retreated by more than a kilometre since my father first saw it.
A triangle with sides three, four and five has a right angle.
The thieves entered through the roof and left through the front door.
Fresh bread smells best when one is hungry.
She runs ten kilometres before breakfast and swims on Sundays.
The court ruled that the tax was against the constitution.
Electric cars are quiet, so they must make a sound at low speed.
Rice is the staple food of more than half of the people in the world.
The compiler warned about an unused variable in line forty two.
When the power failed, they went on reading by candlelight.
Owls can turn their heads almost all the way round.
The price includes breakfast, but not the tax for tourists.
Steel is iron with a little carbon and sometimes other metals.
The mayor opened the new library and borrowed the first book.
Nothing grows under the walnut tree.
A good map is worth more than a fast car.
The choir rehearses every Wednesday evening in the hall of the school.
His knee hurt on the way down, but not on the way up.
Galaxies rotate faster at the edge than their visible stars can explain.
We regret that your application was not successful this time.
""".strip().splitlines()

HELD_OUT = """
The ferry to the island does not sail when the wind is too strong.
Cut the onions finely and fry them slowly in butter.
The company cut four hundred jobs and closed its factory in the north.
How do birds find their way across the ocean?
The program crashes when the input file is empty.
The orchestra played the symphony without a break.
Salt lowers the temperature at which water freezes.
The striker scored three goals in the first half.
Yes, of course.
Inflation slowed for the third month in a row.
A binary tree is balanced when its branches are about equally long.
My uncle repairs old clocks in a shop by the river.
The hotel is five minutes on foot from the central station.
The doctor advised him to sleep more and to drink less coffee.
Plants need light, water and a few minerals to grow.
Where can I buy a ticket for tomorrow?
Parliament passed the law after a debate of nine hours.
The sculptor worked with marble that he chose himself.
An earthquake shook the city early in the morning.
Write a test that fails before you mend the bug.
Elephants remember places where they once found water.
The tenant must give notice three months before leaving.
I forgot my umbrella and came home wet.
Paper was invented in China almost two thousand years ago.
The shop opens at nine and closes at half past six.
A lorry overturned on the motorway and blocked two lanes for hours.
Snow fell all night and in the morning the village was silent.
Neural networks learn features from examples instead of rules.
A spider is not an insect, since it has eight legs.
The function returns a copy and leaves its argument alone.
The film won four prizes, among them the one for the best script.
Coffee became more expensive after the frost in Brazil.
Good luck with your exam!
The castle was destroyed by fire and never built again.
She learned to read music before she learned to read words.
Bake the cake for forty minutes and let it cool in the tin.
The probe sent back pictures of the surface of the comet.
Dogs are not allowed on the beach in summer.
Light from the sun takes about eight minutes to reach us.
This suitcase is too heavy to carry up the stairs.
The police asked witnesses of the accident to come forward.
Antibiotics do not help against a virus.
The poem has fourteen lines and two rhymes.
Let us meet at the entrance at a quarter to eight.
The lake dries up almost completely every summer.
The sum of the angles of a triangle is one hundred and eighty degrees.
Someone stole the bicycle although it was locked.
The soup tastes better on the second day.
He climbed the mountain alone and without oxygen.
The judge postponed the trial until the autumn.
Solar panels on the roof supply half of the electricity we use.
Maize came to Europe from the Americas in the sixteenth century.
The build is slow because every file includes the same header.
They danced in the street until the band went home.
Bats hunt insects in complete darkness by listening to echoes.
The room has a view of the harbour and a small balcony.
Copper conducts electricity better than iron does.
The village school has eleven pupils and one teacher.
Moss covers the stones on the north side of the wall.
An honest answer is better than a clever one.
The exhibition shows photographs from the first years of the railway.
Her shoulder healed more quickly than the surgeon had expected.
The universe has been expanding since its beginning.
Thank you for your letter, which reached me only yesterday.
""".strip().splitlines()
