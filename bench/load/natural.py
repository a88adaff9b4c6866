"""Natural prompts: questions, and tasks about short passages, as people write them to a chat.

All of it was written for this project. Random words would let a model repeat itself, and so let
speculation gain more than it does in use.
"""

import random
from collections.abc import Iterator

# What a prompt begins with, so that few prompts share a beginning which a prefix cache would hold.
FRAMES = (
    "In about {n} words, please:",
    "I have {n} seconds, so be brief.",
    "You are helping customer {n} of a small company.",
    "This is for a talk to {n} people.",
    "I am {age} years old and new to this.",
    "For a newsletter with {n} readers:",
    "My notes of day {n} are short, so I need your help.",
    "Answer in {few} short paragraphs.",
    "Give me {few} reasons, and one against it.",
    "Explain it in {few} steps.",
    "I asked {few} friends, and each said something else.",
    "We are a team of {age}, and we have to decide by Friday.",
)
QUESTIONS = (
    "What should I know before I start with {topic}?",
    "How would you explain {topic} to a child who likes dinosaurs?",
    "Why do so many people give up on {topic} after a month?",
    "Write a short scene in which two neighbours argue about {topic}.",
    "What are common mistakes with {topic}, and how can I avoid them?",
    "Compare {topic} with {other}: which one suits a person with little time?",
    "Draft an email in which I ask my manager for a day off because of {topic}.",
    "What did people think about {topic} a hundred years ago?",
    "Plan a weekend for a family that wants to learn about {topic}.",
    "Which questions would an expert ask me about {topic}?",
    "Is {topic} bad for the environment? Please weigh both sides.",
    "Make up a riddle whose answer is {topic}, and explain it afterwards.",
    "What does {topic} cost in a year, roughly, and where can I save?",
    "Name a book or a film about {topic}, and say why it is worth my evening.",
)
TOPICS = (
    "growing tomatoes on a balcony", "learning to play the cello", "repairing a bicycle",
    "baking bread with sourdough", "keeping bees in a city", "reading maps", "night trains",
    "chess openings", "solar panels on a flat roof", "sailing a small boat", "old photographs",
    "training for a marathon", "writing unit tests", "birds that migrate", "home insurance",
    "the history of paper", "brewing tea", "sleeping badly", "volcanoes", "restoring furniture",
    "moving to another country", "choosing a first telescope", "coral reefs", "public libraries",
    "making cheese", "knitting a sweater", "tides", "working from home", "raising two cats",
    "the invention of zero", "mountain railways", "paying off a loan", "wild mushrooms",
)  # fmt: skip
TASKS = (
    "Summarize this text in two sentences.",
    "What is the main point of the following, and what is left out?",
    "Rewrite this so that a child of ten understands it.",
    "Find a title for this text, and give two alternatives.",
    "Which facts in the following should be checked, and how?",
    "Turn these notes into a polite letter.",
    "Continue this text in the same tone for one paragraph.",
    "Translate the first sentence of this into French, and explain each word.",
    "List everything that someone has to do according to this text.",
    "Disagree with this text in a friendly way.",
)
PASSAGES = (
    "The ferry used to leave at six, when the fishermen came back, and the whole village knew its"
    " whistle. Since the bridge was opened, most people drive, and the ferry goes only twice a"
    " week. The captain says that he will retire in spring. A group of teachers wants to buy the"
    " boat and run it as a school on the water, but the harbour office asks for a second engine"
    " first.",
    "Our heating broke on the coldest night of the year. The company answered the phone after"
    " forty minutes and promised a technician before noon. No one came. In the evening a neighbour"
    " found a loose wire behind the pump, and it has worked since then. I would like my deposit"
    " back, and I would also like to know why the emergency number was not answered by a person.",
    "A sourdough starter is a small community of yeasts and bacteria. The bacteria make acids,"
    " which keep other microbes away and give the bread its taste, while the yeasts produce the"
    " gas that lifts the dough. If you bake once a week, you can keep it in the refrigerator and"
    " feed it two days before. If it smells like nail polish, it is hungry, and not dead.",
    "The meeting began late because the projector did not work. Maria reported that the new"
    " payment page goes live on the ninth, if the bank confirms the certificates. Two tests fail"
    " at random, and Jonas will find out why. The printers are postponed to autumn. Everyone"
    " should read the draft of the travel rules and send comments to Aisha by Thursday.",
    "When swifts leave the nest, they fly for two or three years without landing. They eat, drink"
    " and even sleep in the air. Because modern roofs have no gaps, they find fewer places to"
    " breed, and their number in our town has halved in fifteen years. Nest boxes under the eaves"
    " help, and a recording of their calls in May tells them that the boxes are there.",
    "The old mill stands at the end of the valley, where the road becomes a path. Its wheel has"
    " not turned since the flood of 1954, yet the stones inside are still dusty, as if the miller"
    " had gone out for lunch. On the door someone has written a telephone number in chalk. I"
    " called it once, out of curiosity, and a woman answered as if she had waited for me.",
    "Version 3 of our format stores dates as seconds since 1970 and no longer as text. Readers of"
    " version 2 fail on such files with a message about an unknown type. The converter goes"
    " through a folder and leaves a copy of each file beside the new one. On a machine with slow"
    " disks that took eleven hours for two million files, so start it on a Friday evening.",
    "Tides are higher when sun and moon pull in one line, at new moon and at full moon. In a wide"
    " ocean the difference is less than a metre. Where a bay becomes narrow and shallow, the water"
    " piles up, and if the bay has just the length at which it swings with the tide, as a bathtub"
    " swings with a hand, the difference may be more than fifteen metres.",
    "My grandmother wrote down no recipes. She said that flour behaves differently every day, and"
    " that a number on paper would only make me deaf to the dough. After her death we tried to"
    " bake her plum cake from memory, five cousins with five opinions. The best one came from the"
    " cousin who had never been allowed into the kitchen, and had watched through the window.",
    "The council proposes to close the ring road for cars on the first Sunday of each month."
    " Shops along the road fear for their customers, although most of them are closed on Sundays."
    " Doctors of the children's hospital support the plan. The bus company needs a detour of six"
    " minutes and asks who pays for it. A decision is expected after the summer break.",
)


def natural_texts(count: int, seed: int) -> list[str]:
    """Return `count` different prompts of 10 to 100 words, the same for the same seed."""
    source = random.Random(f"{seed}/texts")
    texts: dict[str, None] = {}
    for text in _drawn(source):
        texts[text if text not in texts else f"{text} ({len(texts)})"] = None
        if len(texts) == count:
            break
    return list(texts)


def _drawn(source: random.Random) -> Iterator[str]:
    while True:
        frame = source.choice(FRAMES).format(
            n=source.randrange(20, 400), age=source.randrange(12, 90), few=source.randrange(2, 7)
        )
        topic, other = source.sample(TOPICS, 2)
        if source.random() < 0.5:
            yield f"{frame} {source.choice(QUESTIONS).format(topic=topic, other=other)}"
        else:
            yield f"{frame} {source.choice(TASKS)}\n\n{source.choice(PASSAGES)}"
