"""Write the words that the page may highlight: the most common content words of the training text of the model in the
package, one per line, the most common first, so that a word's line is its rank.

    python scripts/make_page_words.py WIKIPEDIA_FILE.jsonl.xz ... > src/adlm/serving/static/words.txt

Function words are left out: articles, pronouns, prepositions, conjunctions, auxiliaries, and adverbs, numbers and
connectives that say nothing about the subject of a sentence. So are words of one or two letters.
"""

import collections
import json
import lzma
import re
import sys
from pathlib import Path

WORD = re.compile(r"[^\W\d_]+")
MOST = 16_000
FUNCTION_WORDS = """
a an the this that these those such same other another others each every either neither both all any some none no not
nor half several many much more most few fewer fewest less least little own enough plenty various numerous certain i
me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us our
ours ourselves they them their theirs themselves one ones oneself who whom whose which what whoever whomever whichever
whatever anyone anybody anything someone somebody something everyone everybody everything nobody nothing aboard about
above across after against along alongside amid amidst among amongst around as aside at atop barring before behind
below beneath beside besides between betwixt beyond by circa concerning considering despite down during except
excepting excluding following for from given in including inside into like minus near nearby next notwithstanding of
off on onto opposite out outside over past pending per plus prior pro regarding round save since further than through
throughout thru till to toward towards under underneath unlike until unto up upon upward upwards versus via vis with
within without worth and or but if unless because although though while whilst whereas whereby wherein whereupon
wherever whenever when where why how so then thus hence therefore thereby therein thereof thereafter thereupon hereby
herein hereafter however nevertheless nonetheless moreover furthermore otherwise instead meanwhile lest whether
provided providing once albeit am is are was were be been being have has had having do does did doing done will would
shall should can could may might must ought need dare used let lets cannot don didn doesn isn wasn weren hasn haven
hadn won wouldn couldn shouldn ain aren mustn ll ve re here there now ever never always often sometimes usually
generally typically commonly frequently rarely seldom already also too very quite rather somewhat almost nearly just
only even still yet again else ago away back forth together apart perhaps maybe indeed merely simply mainly mostly
largely partly particularly especially specifically respectively approximately roughly exactly actually really
certainly probably possibly likely apparently essentially virtually relatively fairly highly extremely increasingly
entirely completely fully wholly altogether alone instead later earlier afterward afterwards beforehand formerly
previously subsequently eventually finally initially originally currently recently soon first second third fourth
fifth sixth seventh eighth ninth tenth last zero two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
hundreds thousand thousands million millions billion billions dozen dozens yes oh etc eg ie vs de la le les du des et
en el los las von van der den und di da del al il st mr mrs ms dr jr sr far well much long anyway anyhow anywhere
somewhere everywhere nowhere elsewhere hitherto thence whence whither hither according due owing regardless namely viz
inasmuch insofar whatsoever whosoever howsoever get gets got getting gotten go goes went gone going come comes came
coming make makes made making take takes took taken taking give gives gave giving say says said saying become becomes
became becoming said january february march april may june july august september october november december monday
tuesday wednesday thursday friday saturday sunday
"""


def main(paths: list[str]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for path in map(Path, paths):
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
            for line in lines:
                counts.update(WORD.findall(json.loads(line)["text"].lower()))
    left_out = set(FUNCTION_WORDS.split())
    # ties in alphabetical order, so that the same text gives the same list
    found = sorted((w for w in counts if len(w) > 2 and w not in left_out), key=lambda w: (-counts[w], w))
    print("\n".join(found[:MOST]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("make_page_words: which files? (jsonl, or jsonl.xz, with a field `text`)")
    main(sys.argv[1:])
