"""Sentence templates of the word problems: plain data, read by `problems.py`.

A template's question uses {n}, {m} (two different names), {o} (things), {p} (a place) and the drawn numbers by letter;
"[a|b]" picks one wording at random. `draws` is "letter:low-high" for a uniform integer or "letter=x*y" for a derived
one.
Each step is (sentence, expression, letter of the result); "@" in the sentence stands for the worked expression.
The answer's wording is fixed by the template, so that a question has exactly one answer text.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    question: str
    draws: str
    steps: tuple[tuple[str, str, str], ...]


NAMES = (  # noqa: SIM905 (so too below: a word list is easier to read unquoted)
    "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karla Leo Maria Nadia Oscar Paula Quentin Rosa Simon Tara "
    "Uma Victor Wendy Xavier Yusuf Zoe Amir Bella Carlos Dina Emil Fatima Gustav Hana Ivan Julia Kofi Lina Marco Noor"
).split()

THINGS = (  # noqa: SIM905
    "apples books pencils marbles stamps cookies shells coins cards stickers oranges flowers beads buttons toys "
    "ribbons candles muffins lemons carrots peaches pears plums rocks crayons tickets erasers badges balloons magnets "
    "walnuts onions potatoes tomatoes bottles cups plates spoons photos letters"
).split()

PLACES = "market school library farm bakery museum harbor station garden shop".split()  # noqa: SIM905

TEMPLATES = (
    # one step
    Template(
        "{n} has {a} {o} in a box at home. On the way back from the {p}, {m} [gives|hands|sends] {n} {b} more {o}. How "
        "many {o} does {n} have now?",
        "a:5-95 b:3-60",
        (("After the gift {n} has @ {o}.", "a+b", "x"),),
    ),
    Template(
        "{n} collects {o} and owns {a} of them. [At|In] the {p}, {n} decides to give {b} {o} to {m}. How many {o} are "
        "left for {n}?",
        "a:20-120 b:3-80",
        (("After giving some away {n} keeps @ {o}.", "a-b", "x"),),
    ),
    Template(
        "A crate at the {p} [holds|contains] {a} {o}. {n} counts {b} crates that are all the same. How many {o} are in "
        "the crates altogether?",
        "a:3-20 b:2-12",
        (("The crates contain @ {o}.", "a*b", "x"),),
    ),
    Template(
        "{n} wants to share {a} {o} [equally|evenly] among {b} friends, and {m} helps to count them at the {p}. How "
        "many {o} does each friend receive?",
        "b:2-9 q:2-20 a=b*q",
        (("Each friend receives @ {o}.", "a/b", "x"),),
    ),
    Template(
        "There are {a} {o} on the first shelf of the {p} and {b} {o} on the second shelf. {n} [tidies|cleans] both "
        "shelves. How many {o} are on the two shelves together?",
        "a:10-120 b:10-90",
        (("The two shelves hold @ {o}.", "a+b", "x"),),
    ),
    Template(
        "{n} earns {a} dollars for every hour of work at the {p}. This week {n} [worked|helped] for {b} hours. How "
        "many dollars did {n} earn this week?",
        "a:5-20 b:2-12",
        (("This week {n} earned @ dollars.", "a*b", "x"),),
    ),
    Template(
        "A [rope|ribbon|cable] in the {p} is {a} meters long. {n} cuts it into {b} pieces of the same length for {m}. "
        "How many meters long is each piece?",
        "b:2-9 q:2-20 a=b*q",
        (("Each piece is @ meters long.", "a/b", "x"),),
    ),
    Template(
        "{n} needs {a} {o} to finish a project for the {p}. So far {n} has [collected|found|gathered] {b} {o}. How "
        "many more {o} does {n} need?",
        "a:30-150 b:5-120",
        (("{n} still needs @ more {o}.", "a-b", "x"),),
    ),
    # two steps
    Template(
        "{n} has {a} {o}. {m} has {b} more {o} than {n}. They [meet|talk] at the {p} and put everything on one table. "
        "How many {o} do they have together?",
        "a:5-60 b:2-40",
        (("{m} has @ {o}.", "a+b", "x"), ("Together they have @ {o}.", "a+x", "y")),
    ),
    Template(
        "{n} buys {a} packs of {o} at the {p}. Every pack [holds|contains] {b} {o}. Then {n} gives {c} {o} to {m}. How "
        "many {o} does {n} keep?",
        "a:2-12 b:3-15 c:2-40",
        (("{n} buys @ {o}.", "a*b", "x"), ("After the gift {n} keeps @ {o}.", "x-c", "y")),
    ),
    Template(
        "In [April|June|October] {n} sold {a} {o} at the {p}. In the next month {n} sold half as many {o}. How many "
        "{o} did {n} sell in both months?",
        "q:4-60 a=q*2",
        (("In the next month {n} sold @ {o}.", "a/2", "x"), ("In both months {n} sold @ {o}.", "a+x", "y")),
    ),
    Template(
        "{n} had {a} dollars before a visit to the {p}. {n} [bought|paid for] {b} {o} that cost {c} dollars each. How "
        "many dollars does {n} have left?",
        "a:40-200 b:2-9 c:2-12",
        (("The {o} cost @ dollars.", "b*c", "x"), ("{n} has @ dollars left.", "a-x", "y")),
    ),
    Template(
        "{n} and {m} pick {o} near the {p}. {n} picks {a} {o} and {m} picks {b} {o}. They share all of them "
        "[equally|evenly] among {c} baskets. How many {o} go into each basket?",
        "c:2-9 q:3-20 b:2-40 s=c*q a=s-b",
        (("They pick @ {o}.", "a+b", "x"), ("Each basket gets @ {o}.", "x/c", "y")),
    ),
    Template(
        "{n} reads {a} pages every day. A book from the {p} has {b} pages and {n} has [already|so far] been reading "
        "for {c} days. How many pages are left to read?",
        "a:3-20 b:80-250 c:2-12",
        (("So far {n} has read @ pages.", "a*c", "x"), ("There are @ pages left.", "b-x", "y")),
    ),
    Template(
        "{m} has {a} {o}. {n} has {b} times as many {o} as {m}. They [compare|show] their {o} at the {p}. How many {o} "
        "do the two have altogether?",
        "a:3-25 b:2-6",
        (("{n} has @ {o}.", "a*b", "x"), ("Altogether they have @ {o}.", "a+x", "y")),
    ),
    Template(
        "A bus leaves the {p} with {a} people. At the first stop {b} people get off and {c} people get on. {n} is the "
        "[driver|guard]. How many people are on the bus now?",
        "a:25-90 b:3-24 c:2-40",
        (("After people get off there are @ people.", "a-b", "x"), ("Now there are @ people.", "x+c", "y")),
    ),
    Template(
        "{n} bakes {a} trays of muffins for the {p}, and each tray has {b} muffins. The muffins are [packed|placed] in "
        "boxes of {c}. How many boxes does {n} fill?",
        "a:2-10 c:2-9 q:2-6 b=c*q",
        (("{n} bakes @ muffins.", "a*b", "x"), ("{n} fills @ boxes.", "x/c", "y")),
    ),
    Template(
        "{n} saves {a} dollars in the first week and {b} dollars in the second week. A [bicycle|guitar|camera] at the "
        "{p} costs {c} dollars. How many more dollars does {n} need?",
        "a:10-60 b:10-60 c:125-250",
        (("So far {n} has saved @ dollars.", "a+b", "x"), ("{n} still needs @ dollars.", "c-x", "y")),
    ),
    Template(
        "There are {a} rows of chairs in the {p} with {b} chairs in each row. {n} [brings|adds] {c} more chairs for a "
        "concert. How many chairs are there in the end?",
        "a:3-12 b:4-15 c:3-50",
        (("The rows have @ chairs.", "a*b", "x"), ("In the end there are @ chairs.", "x+c", "y")),
    ),
    Template(
        "{n} picked {a} {o} on Monday. On Tuesday {n} picked {b} fewer {o} than on Monday. All this [happened|took "
        "place] behind the {p}. How many {o} did {n} pick on both days?",
        "a:20-90 b:2-19",
        (("On Tuesday {n} picked @ {o}.", "a-b", "x"), ("On both days {n} picked @ {o}.", "a+x", "y")),
    ),
    Template(
        "A [farmer|seller] at the {p} has {a} {o} and sells {b} of them. The rest is divided equally between {n}, {m} "
        "and some friends, {c} people in all. How many {o} does each person get?",
        "c:2-9 q:2-20 b:5-60 s=c*q a=s+b",
        (("After the sale there are @ {o}.", "a-b", "x"), ("Each person gets @ {o}.", "x/c", "y")),
    ),
    Template(
        "{n} runs {a} laps in the morning and {b} laps in the evening. Each lap around the {p} [takes|lasts] {c} "
        "minutes. How many minutes does {n} run in a day?",
        "a:2-10 b:2-10 c:2-9",
        (("{n} runs @ laps a day.", "a+b", "x"), ("That takes @ minutes.", "x*c", "y")),
    ),
    # three steps
    Template(
        "{n} buys {a} {o} for {b} dollars each and {c} cakes for {d} dollars each at the {p}. {m} [waits|stands] "
        "outside. How many dollars does {n} spend in total?",
        "a:2-9 b:2-12 c:2-9 d:2-12",
        (
            ("The {o} cost @ dollars.", "a*b", "x"),
            ("The cakes cost @ dollars.", "c*d", "y"),
            ("In total {n} spends @ dollars.", "x+y", "z"),
        ),
    ),
    Template(
        "{n} has {a} {o}. {m} has twice as many. Their teacher at the {p} [brings|adds] {b} more {o}, and they put all "
        "the {o} into one jar. How many {o} are in the jar?",
        "a:5-45 b:3-50",
        (
            ("{m} has @ {o}.", "a*2", "x"),
            ("Together they have @ {o}.", "a+x", "y"),
            ("The jar holds @ {o}.", "y+b", "z"),
        ),
    ),
    Template(
        "A [shop|stall] near the {p} had {a} {o} in the morning. It sold {b} {o} before noon and {c} {o} after noon. "
        "Then {n} delivered {d} new {o}. How many {o} does it have now?",
        "a:100-200 b:10-45 c:10-45 d:5-60",
        (
            ("Before noon there were @ {o} left.", "a-b", "x"),
            ("After noon there were @ {o} left.", "x-c", "y"),
            ("Now there are @ {o}.", "y+d", "z"),
        ),
    ),
    Template(
        "{n} works {a} hours a day for {b} days at the {p} and earns {c} dollars per hour. {n} [works|helps] with "
        "care. After the week {n} pays {d} dollars for food. How many dollars remain?",
        "a:2-8 b:2-6 c:3-9 d:5-30",
        (
            ("{n} works @ hours.", "a*b", "x"),
            ("{n} earns @ dollars.", "x*c", "y"),
            ("After food @ dollars remain.", "y-d", "z"),
        ),
    ),
    Template(
        "{n} collected {a} {o} in spring and {b} times as many in summer. At the {p} {n} [lost|dropped] {c} of all the "
        "{o}. How many {o} does {n} still have?",
        "a:4-25 b:2-6 c:3-30",
        (
            ("In summer {n} collected @ {o}.", "a*b", "x"),
            ("In both seasons {n} collected @ {o}.", "a+x", "y"),
            ("After the loss {n} still has @ {o}.", "y-c", "z"),
        ),
    ),
    Template(
        "For a party at the {p}, {n} makes {a} bags and puts {b} {o} in each bag. {m} makes {c} bags with {d} {o} "
        "each. How many more {o} does {n} [use|need] than {m}?",
        "a:5-12 b:5-12 c:2-8 d:2-8",
        (
            ("{n} uses @ {o}.", "a*b", "x"),
            ("{m} uses @ {o}.", "c*d", "y"),
            ("{n} uses @ more {o}.", "x-y", "z"),
        ),
    ),
    Template(
        "{n} had {a} {o} and {m} gave {n} {b} more. At the {p} {n} [sold|traded] {c} of them and divided the rest "
        "equally into {d} boxes. How many {o} are in each box?",
        "d:2-9 q:2-20 b:5-40 c:5-40 r=d*q s=r+c a=s-b",
        (
            ("With the gift {n} had @ {o}.", "a+b", "x"),
            ("After that {n} had @ {o}.", "x-c", "y"),
            ("Each box has @ {o}.", "y/d", "z"),
        ),
    ),
    Template(
        "The {p} has {a} red {o} and half as many blue {o}. There are also {b} green {o}. {n} [counts|paints] all of "
        "them. How many {o} are there in total?",
        "q:5-50 a=q*2 b:5-60",
        (
            ("There are @ blue {o}.", "a/2", "x"),
            ("Red and blue make @ {o}.", "a+x", "y"),
            ("In total there are @ {o}.", "y+b", "z"),
        ),
    ),
    Template(
        "{n} drives {a} kilometers on Monday and {b} kilometers more than that on Tuesday. The whole [trip|journey] to "
        "the {p} is {c} kilometers. How many kilometers are left after Tuesday?",
        "a:20-80 b:5-40 c:210-300",
        (
            ("On Tuesday {n} drives @ kilometers.", "a+b", "x"),
            ("After two days {n} has driven @ kilometers.", "a+x", "y"),
            ("There are @ kilometers left.", "c-y", "z"),
        ),
    ),
    Template(
        "{n} plants {a} rows with {b} flowers each behind the {p}. In the [storm|frost], {c} flowers die. {n} puts the "
        "others in vases with {d} flowers each. How many vases does {n} need?",
        "d:2-6 q:2-20 a:3-10 b:4-15 t=a*b r=d*q c=t-r",
        (
            ("{n} plants @ flowers.", "a*b", "x"),
            ("After that there are @ flowers.", "x-c", "y"),
            ("{n} needs @ vases.", "y/d", "z"),
        ),
    ),
    Template(
        "A class at the {p} has {a} girls and {b} boys. Each child brings {c} {o}, and {n} [keeps|stores] {d} of these "
        "{o} for later. How many {o} can the class use now?",
        "a:5-18 b:5-18 c:2-6 d:3-20",
        (
            ("The class has @ children.", "a+b", "x"),
            ("They bring @ {o}.", "x*c", "y"),
            ("Now the class can use @ {o}.", "y-d", "z"),
        ),
    ),
    Template(
        "{n} has {a} dollars and {m} has {b} dollars. At the {p} they [buy|choose] {c} {o} together for {d} dollars "
        "each. How many dollars do they have left?",
        "a:30-90 b:30-90 c:2-8 d:2-7",
        (
            ("Together they have @ dollars.", "a+b", "x"),
            ("The {o} cost @ dollars.", "c*d", "y"),
            ("They have @ dollars left.", "x-y", "z"),
        ),
    ),
)
