"""The public tasks by name: labels, metric, wording, where their files lie and where the hub keeps them.

A row says what does not change from machine to machine; `readers` knows the forms of the files. Wordings are those of
LM-BFF and of the grafting study (masked), of surface-form-competition scoring (causal) and of the frozen-feature study
(`feature_prompt`, appended to a document).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from budwood.data.task import Kind, Template


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set of the hub: its id and configuration, the columns that matter, and other names of its splits."""

    id: str
    config: str | None = None
    text: str | tuple[str, ...] = "sentence"  # several columns are joined by a space
    pair: str | None = None
    label: str | None = "label"
    splits: tuple[tuple[str, str], ...] = ()  # our name of a split and the hub's, where they differ


@dataclass(frozen=True, slots=True)
class PublicTask:
    """One public task.

    `folders` are names under which its folder is known, besides NAME and glue/NAME; `reader` is a function of
    `budwood.data.readers`; `codes` are labels as they stand in files where they differ from the names in `labels`.
    """

    name: str
    reader: str
    folders: tuple[str, ...]
    labels: tuple[str, ...] = ()
    kind: Kind = "label"
    metric: str = "accuracy"
    template: Template | None = None
    hub: Hub | None = None
    codes: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, float] | None = None
    feature_prompt: str = ""
    cut_by: Literal["", "text", "pair"] = ""  # rows that share this text stay together where the set has to be cut
    version: str = "1"


NEGATIVE = ("negative", "positive")
THREE_WAY = ("contradiction", "entailment", "neutral")
TWO_WAY = ("entailment", "not_entailment")
THREE_CODES = (("0", "entailment"), ("1", "neutral"), ("2", "contradiction"))  # where a file has the hub's integers

_TONE = '"{text}" has a tone that is'
_TRUE = "{text}\n question: {pair} true or false?\n answer:"
_NEITHER = "{text}\n question: {pair} true, false, or neither?\n answer:"
_ENTAILS = "{text|chop} ? {mask} , {pair|lower}"
_SAME = "{text} {mask} , {pair|lower}"


def _feeling(limit: int = 0) -> Template:
    return Template("{text} It was {mask} .", ("terrible", "great"), _TONE, NEGATIVE, (limit, 0))


def _three_way(limit: int = 0) -> Template:
    return Template(_ENTAILS, ("No", "Yes", "Maybe"), _NEITHER, ("false", "true", "neither"), (limit, 0))


def _two_way(limit: int = 0) -> Template:
    return Template(_ENTAILS, ("Yes", "No"), _TRUE, ("true", "false"), (limit, 0))


def _glue(config: str, text: str = "sentence", pair: str | None = None, kind: str = "") -> Hub:
    splits = (("validation", f"validation_{kind}"), ("test", f"test_{kind}")) if kind else ()
    return Hub("nyu-mll/glue", config, text, pair, splits=splits)


_PARAPHRASE = Template(_SAME, ("No", "Yes"), _TRUE, ("false", "true"))
_MOVIE, _FEELING_PROMPT, _ARTICLE = " This movie is", " The sentiment is", " This article is about"
_TREC = (
    ("DESC", "Description"),
    ("ENTY", "Entity"),
    ("ABBR", "Expression"),
    ("HUM", "Human"),
    ("LOC", "Location"),
    ("NUM", "Number"),
)
_TOPIC = " summary: {text}\n topic:"
_DBPEDIA = (
    *("Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder", "MeanOfTransportation", "Building"),
    *("NaturalPlace", "Village", "Animal", "Plant", "Album", "Film", "WrittenWork"),
)
_DBPEDIA_WORDS = (
    *("Company", "School", "Artist", "Athlete", "Politics", "Transport", "Building"),
    *("Nature", "Village", "Animal", "Plant", "Album", "Film", "Book"),
)
_YAHOO = (
    *("Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet"),
    *("Sports", "Business & Finance", "Entertainment & Music", "Family & Relationships", "Politics & Government"),
)
_YAHOO_WORDS = (
    *("Society", "Science", "Health", "Education", "Computer"),
    *("Sports", "Business", "Entertainment", "Family", "Politics"),
)
_ENTITIES = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")

_GLUE = (
    PublicTask(
        *("cola", "cola", ("CoLA",), ("unacceptable", "acceptable")),
        metric="mcc",
        template=Template(
            "{text} This is {mask} .", ("incorrect", "correct"), "{text} This is", ("incorrect", "correct")
        ),
        hub=_glue("cola"),
    ),
    PublicTask(
        *("sst2", "glue", ("SST-2", "SST2"), NEGATIVE),
        template=_feeling(),
        hub=_glue("sst2"),
        feature_prompt=_MOVIE,
    ),
    PublicTask(
        *("mrpc", "glue", ("MRPC",), ("not_equivalent", "equivalent")),
        metric="f1",
        template=_PARAPHRASE,
        hub=_glue("mrpc", "sentence1", "sentence2"),
    ),
    PublicTask("rte", "glue", ("RTE",), TWO_WAY, template=_two_way(240), hub=_glue("rte", "sentence1", "sentence2")),
    PublicTask(
        "qnli",
        "glue",
        ("QNLI",),
        TWO_WAY,
        template=_two_way(),
        hub=_glue("qnli", "question", "sentence"),
        cut_by="pair",
    ),
    PublicTask(
        *("qqp", "glue", ("QQP",), ("not_duplicate", "duplicate")),
        metric="f1",
        template=_PARAPHRASE,
        hub=_glue("qqp", "question1", "question2"),
    ),
    PublicTask(
        *("mnli", "glue", ("MNLI", "multinli"), THREE_WAY),
        template=_three_way(110),
        hub=_glue("mnli", "premise", "hypothesis", "matched"),
        cut_by="text",
        codes=THREE_CODES,
    ),
    PublicTask(
        *("mnli-mm", "glue", ("MNLI", "multinli"), THREE_WAY),
        template=_three_way(110),
        hub=_glue("mnli", "premise", "hypothesis", "mismatched"),
        cut_by="text",
        codes=THREE_CODES,
    ),
    PublicTask(
        *("wnli", "glue", ("WNLI",), ("not_entailment", "entailment")),
        template=Template(_ENTAILS, ("No", "Yes"), _TRUE, ("false", "true")),
        hub=_glue("wnli", "sentence1", "sentence2"),
    ),
    PublicTask(
        *("stsb", "glue", ("STS-B", "STSB", "sts_b")),
        kind="regression",
        metric="pearson",
        template=_PARAPHRASE,
        hub=_glue("stsb", "sentence1", "sentence2"),
        bounds=(0.0, 5.0),
    ),
)

_PAIRS = (
    PublicTask(
        *("snli", "glue", ("SNLI", "snli_1.0"), THREE_WAY),
        template=_three_way(),
        hub=Hub("stanfordnlp/snli", None, "premise", "hypothesis"),
        cut_by="text",
        codes=THREE_CODES,
    ),
    PublicTask(
        *("sick", "glue", ("SICK",), THREE_WAY),
        template=_three_way(),
        hub=Hub("RobZamp/sick", None, "sentence_A", "sentence_B"),
    ),
    PublicTask(
        *("anli", "anli", ("anli_v1.0", "anli_v0.1"), THREE_WAY),
        template=_three_way(),
        codes=(("e", "entailment"), ("n", "neutral"), ("c", "contradiction")),
        cut_by="text",
    ),
    PublicTask(
        *("hans", "glue", ("HANS",), TWO_WAY),
        template=_two_way(),
        codes=(("non-entailment", "not_entailment"),),
    ),
)

_SINGLE = (
    PublicTask(
        *(
            "sst5",
            "sentences",
            ("sst-5", "sst_fine", "sst2_fine"),
            ("very negative", "negative", "neutral", "positive", "very positive"),
        ),
        template=Template(
            "{text} It was {mask} .",
            ("terrible", "bad", "okay", "good", "great"),
            _TONE,
            ("terrible", "bad", "okay", "good", "great"),
            (110, 0),
        ),
        hub=Hub("SetFit/sst5", None, "text"),
        feature_prompt=_MOVIE,
    ),
    PublicTask(
        *("sst2-6920", "sentences", ("sst_binary", "sst-2-6920", "sst"), NEGATIVE),
        template=_feeling(),
        hub=Hub("SetFit/sst2", None, "text"),
        feature_prompt=_MOVIE,
    ),
    PublicTask(
        *("mr", "sentences", ("rt-polaritydata", "movie_reviews"), NEGATIVE),
        template=_feeling(110),
        hub=Hub("cornell-movie-review-data/rotten_tomatoes", None, "text"),
    ),
    PublicTask(
        *("cr", "sentences", ("custrev", "customerr"), NEGATIVE),
        template=_feeling(110),
        hub=Hub("SetFit/CR", None, "text"),
        feature_prompt=_FEELING_PROMPT,
    ),
    PublicTask("mpqa", "sentences", ("MPQA",), NEGATIVE, template=_feeling(110), feature_prompt=_FEELING_PROMPT),
    PublicTask(
        *("subj", "sentences", ("rotten_imdb", "SUBJ"), ("subjective", "objective")),
        template=Template(
            "{text} This is {mask} .", ("subjective", "objective"), _TONE, ("subject", "object"), (110, 0)
        ),
        hub=Hub("SetFit/subj", None, "text"),
    ),
    PublicTask(
        *("trec", "sentences", ("TREC",), tuple(name for _, name in _TREC)),
        template=Template(
            "{mask} : {text}",
            tuple(name for _, name in _TREC),
            "{text} The answer to this question will be a",
            (
                "description",
                "entity",
                "phrase",
                "person",
                "location",
                "number",
            ),  # one token each, unlike "an abbreviation."
            (110, 0),
        ),
        hub=Hub("CogComp/trec", None, "text", label="coarse_label"),
        codes=_TREC,
    ),
    PublicTask(
        *("agnews", "topics", ("ag_news", "ag_news_csv", "ag-news"), ("World", "Sports", "Business", "Sci/Tech")),
        template=Template(
            "{mask} : {text}",
            ("World", "Sports", "Business", "Tech"),
            _TOPIC,
            ("World", "Sports", "Business", "Science"),
            (110, 0),
        ),
        hub=Hub("fancyzhx/ag_news", None, "text"),
        feature_prompt=_ARTICLE,
    ),
    PublicTask(
        *("dbpedia", "topics", ("dbpedia_csv", "dbpedia_14"), _DBPEDIA),
        template=Template("{mask} : {text}", _DBPEDIA_WORDS, _TOPIC, _DBPEDIA_WORDS, (110, 0)),
        hub=Hub("fancyzhx/dbpedia_14", None, ("title", "content")),
    ),
    PublicTask(
        *("yahoo", "topics", ("yahoo_answers_csv", "yahoo_answers_topics"), _YAHOO),
        template=Template("{mask} : {text}", _YAHOO_WORDS, _TOPIC, _YAHOO_WORDS, (110, 0)),
        hub=Hub(
            *("community-datasets/yahoo_answers_topics", None),
            text=("question_title", "question_content", "best_answer"),
            label="topic",
        ),
    ),
    PublicTask(
        *("yelp-polarity", "topics", ("yelp_review_polarity_csv", "yelp_polarity"), NEGATIVE),
        template=_feeling(110),
        hub=Hub("fancyzhx/yelp_polarity", None, "text"),
    ),
    PublicTask(
        *("amazon-polarity", "topics", ("amazon_review_polarity_csv", "amazon_polarity"), NEGATIVE),
        template=_feeling(110),
        hub=Hub("fancyzhx/amazon_polarity", None, ("title", "content")),
    ),
    PublicTask(
        *("imdb", "reviews", ("aclImdb", "IMDB"), NEGATIVE),
        template=_feeling(110),
        hub=Hub("stanfordnlp/imdb", None, "text"),
        codes=(("neg", "negative"), ("pos", "positive")),
        feature_prompt=_MOVIE,
    ),
)

_OTHER = (
    PublicTask(
        *("squad2", "squad", ("squad2-minggg", "squad_v2", "squad-v2", "SQuAD2", "squad")),
        kind="span",
        metric="f1",
        hub=Hub("rajpurkar/squad_v2", None, "question", "context", "answers"),
    ),
    PublicTask(
        *("conll", "conll", ("conll2003", "conll03", "conll-2003"), _ENTITIES),
        kind="tokens",
        metric="f1",
        hub=Hub("eriktks/conll2003", None, "tokens", label="ner_tags"),
    ),
    PublicTask(
        *("wikitext-2", "wikitext", ("wikitext2", "wikitext-2-raw", "wikitext-2-v1", "wikitext-2-raw-v1")),
        kind="text",
        metric="lm_loss",
        hub=Hub("Salesforce/wikitext", "wikitext-2-v1", "text", label=None),
    ),
    PublicTask(
        *("tinystories", "stories", ("TinyStories", "tiny_stories")),
        kind="text",
        metric="lm_loss",
        hub=Hub("roneneldan/TinyStories", None, "text", label=None),
    ),
    PublicTask("arithmetic-published", "sums", ("arithmetic", "Arith"), kind="number", metric="rmsle"),
)

PUBLIC: Mapping[str, PublicTask] = MappingProxyType({task.name: task for task in (*_GLUE, *_PAIRS, *_SINGLE, *_OTHER)})
