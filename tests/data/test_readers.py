"""Every form in which public sets are distributed: made small here, and the real files where they are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from budwood.config.data import DataConfig
from budwood.data.source import load_task
from budwood.data.task import Task
from budwood.errors import DataError


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(task: str, folder: Path, **more) -> Task:
    return load_task(DataConfig(task=task, data_dir=(folder,), **more))


def balance(task: Task, split: str) -> dict:
    return dict(sorted(Counter(row.label for row in task.rows(split)).items()))


def sizes(task: Task) -> dict:
    return {split: len(rows) for split, rows in task.splits.items()}


# --- the real files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cola", {"train": {0: 2528, 1: 6023}, "validation": {0: 322, 1: 721}}),
        ("rte", {"train": {0: 1249, 1: 1241}, "validation": {0: 146, 1: 131}}),
        ("wnli", {"train": {0: 323, 1: 312}, "validation": {0: 40, 1: 31}}),
        ("sst5", {"train": {0: 1092, 1: 2218, 2: 1624, 3: 2322, 4: 1288}}),
        ("sick", {"train": {0: 665, 1: 1299, 2: 2536}, "validation": {0: 74, 1: 144, 2: 282}}),
    ],
)
def test_balances_of_real_files(shared, name, expected):
    task = load(name, shared / "data")
    assert {split: balance(task, split) for split in expected} == expected


def test_sst2_is_read_whole_and_fast(shared):
    import time

    load("rte", shared / "data")
    start = time.process_time()
    task = load("sst2", shared / "data")
    assert time.process_time() - start < 1.0
    assert sizes(task) == {"train": 67349, "validation": 872}
    assert balance(task, "validation") == {0: 428, 1: 444}
    assert task.rows("train")[17].id == "sst2/train/17"
    assert task.rows("validation")[0].text == "it 's a charming and often affecting journey ."
    assert task.notes["unlabelled"] == "no split made of test.tsv"


@pytest.mark.parametrize(
    ("name", "total", "left_out"),
    [("cr", 3773, 2), ("mpqa", 10604, 1), ("qnli", 5463, 0), ("mnli", 9815, 0), ("snli", 9824, 0), ("squad2", 6078, 0)],
)
def test_sets_in_one_piece_are_cut(shared, name, total, left_out):
    task = load(name, shared / "data")
    assert sum(sizes(task).values()) == total - left_out
    assert ("left out" in task.notes) == (left_out > 0)
    assert set(task.splits) == {"train", "validation", "test"}
    assert "80/10/10" in task.notes["split"]
    ids = [row.id for rows in task.splits.values() for row in rows]
    assert len(set(ids)) == len(ids)
    share = len(task.rows("train")) / total
    assert 0.7 < share < 0.9
    other = load(name, shared / "data", data_seed=5)
    assert other.digest == task.digest
    assert load(name, shared / "data", split="80/10/10@1").digest != task.digest


@pytest.mark.parametrize(("name", "part"), [("snli", "text"), ("mnli", "text"), ("qnli", "pair"), ("squad2", "group")])
def test_no_premise_or_article_is_on_both_sides_of_a_cut(shared, name, part):
    task = load(name, shared / "data")
    seen = [{getattr(row, part) for row in rows} for rows in task.splits.values()]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_real_squad(shared):
    task = load("squad2", shared / "data")
    rows = [row for rows in task.splits.values() for row in rows]
    assert sum(not row.answers for row in rows) == 3168
    assert len({row.group for row in rows}) == 16
    assert all(row.pair[start : start + len(text)] == text for row in rows for text, start in row.answers)
    assert task.notes["unlabelled"] == "no split made of test-v2.0.json"


def test_real_texts(shared):
    wiki = load("wikitext-2", shared / "data")
    assert wiki.kind == "text"
    assert set(wiki.splits) == {"train", "validation", "test"}
    kept = [row.text for rows in wiki.splits.values() for row in rows]
    assert not any(text.startswith("= ") and text.endswith(" =") for text in kept)
    headings = 0
    for line in (shared / "data/wikitext-2/test.txt").read_text(encoding="utf-8").split("\n"):
        headings += line.strip().startswith("=") and line.strip().endswith("=")
    words = sum(len(row.text.split()) for row in wiki.rows("test"))
    assert len(wiki.rows("test")) == 4358 - 1467 - headings
    assert 230_000 < words < 245_569
    stories = load("tinystories", shared / "data")
    assert sum(sizes(stories).values()) == 2317
    assert not any("<|endoftext|>" in row.text for row in stories.rows("train"))


def test_real_topics_and_sums(shared):
    news = load("agnews", shared / "data")
    assert sizes(news) == {"train": 5000, "test": 1000}
    assert "subset/" in news.notes["source"]
    assert news.rows("test")[0].label == 0
    published = load("arithmetic-published", shared / "data")
    assert sizes(published) == {"train": 17470, "test": 4368}
    assert (published.rows("test")[0].text, published.rows("test")[0].label) == ("15 + 68 =", 83)


def test_real_regression(shared):
    task = load("stsb", shared / "data")
    assert sizes(task) == {"train": 5749, "validation": 1500}
    assert task.rows("validation")[1].label == 4.75
    assert task.bounds == (0.0, 5.0)
    assert {type(row.label) for row in task.rows("train")} == {float}


# --- small files of every form --------------------------------------------------------------------------------------


def test_mrpc_quotes_are_plain_characters(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    body = '1\t1\t2\t"He said no.\tHe said "no" .\n0\t3\t4\tA b\tC d\n'
    write(tmp_path / "MRPC/train.tsv", header + body)
    write(tmp_path / "MRPC/dev.tsv", header + body)
    task = load("mrpc", tmp_path)
    assert [(r.text, r.pair, r.label) for r in task.rows("train")] == [
        ('"He said no.', 'He said "no" .', 1),
        ("A b", "C d", 0),
    ]


def test_qqp_counts_broken_lines(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    write(tmp_path / "glue/QQP/train.tsv", header + "1\t2\t3\ta ?\tb ?\t0\n4\t5\n9\t5\t6\tc ?\td ?\t1\n")
    write(tmp_path / "glue/QQP/dev.tsv", header + "1\t2\t3\te ?\tf ?\t0\n")
    task = load("qqp", tmp_path)
    assert [r.id for r in task.rows("train")] == ["qqp/train/0", "qqp/train/2"]
    assert task.notes["left out"] == "train: 1 lines with missing columns"
    assert task.notes["train lines left out"] == "1"


def test_mnli_matched_and_mismatched(tmp_path):
    header = "index\tpromptID\tsentence1\tsentence2\tlabel1\tgold_label\n"
    write(tmp_path / "MNLI/train.tsv", header + "0\t1\tA\tB\tneutral\tneutral\n1\t1\tA\tC\tx\t-\n")
    write(tmp_path / "MNLI/dev_matched.tsv", header + "0\t1\tD\tE\tx\tentailment\n")
    write(tmp_path / "MNLI/dev_mismatched.tsv", header + "7\t1\tF\tG\tx\tcontradiction\n")
    write(tmp_path / "MNLI/test_matched.tsv", "index\tsentence1\tsentence2\n0\tH\tI\n")
    matched, mismatched = load("mnli", tmp_path), load("mnli-mm", tmp_path)
    assert [(r.text, r.label) for r in matched.rows("validation")] == [("D", 1)]
    assert [(r.id, r.label) for r in mismatched.rows("validation")] == [("mnli-mm/validation/7", 0)]
    assert matched.notes["left out"] == "train: 1 rows without a gold label ('-')"
    assert "train lines left out" not in matched.notes
    assert matched.notes["unlabelled"] == "no split made of test_matched.tsv"


def test_lmbff_csv(tmp_path):
    write(tmp_path / "mr/train.csv", '1,"good , really ""good"""\n0,bad\n')
    write(tmp_path / "mr/test.csv", "0,awful\n")
    task = load("mr", tmp_path)
    assert [(r.id, r.text, r.label) for r in task.rows("train")] == [
        ("mr/train/0", 'good , really "good"', 1),
        ("mr/train/1", "bad", 0),
    ]


def test_label_tab_text_and_text_tab_label(tmp_path):
    write(tmp_path / "sst_fine/sst_fine_train", '4\tgreat "stuff\n0\tdire\r\n')
    write(tmp_path / "sst_fine/sst_fine_test", "2\tso\tso\n")
    task = load("sst5", tmp_path)
    assert [(r.text, r.label) for r in task.rows("train")] == [('great "stuff', 4), ("dire", 0)]
    assert task.rows("test")[0].text == "so\tso"
    write(tmp_path / "sst2-6920/train.tsv", "sentence\tlabel\nfine\t1\npoor\t0\n")
    assert [(r.id, r.label) for r in load("sst2-6920", tmp_path).rows("train")] == [
        ("sst2-6920/train/0", 1),
        ("sst2-6920/train/1", 0),
    ]


def test_pos_neg_pairs_may_be_latin_1(tmp_path):
    write(tmp_path / "mr/rt-polarity.pos", ("caf\xe9 " + "fine\n" * 12).encode("latin-1"))
    write(tmp_path / "mr/rt-polarity.neg", "poor\n" * 12)
    task = load("mr", tmp_path)
    rows = {r.id: r for part in task.splits.values() for r in part}
    assert rows["mr/pos/0"].text == "caf\xe9 fine"
    assert rows["mr/pos/0"].label == 1
    assert rows["mr/neg/3"].label == 0
    (tmp_path / "mr/rt-polarity.neg").unlink()
    with pytest.raises(DataError, match="file of one class only"):
        load("mr", tmp_path)


def test_subj_and_trec_files(tmp_path):
    write(tmp_path / "subj/subj.subjective", "i feel\n" * 10)
    write(tmp_path / "subj/subj.objective", "he goes\n" * 10)
    task = load("subj", tmp_path)
    assert {(r.text, r.label) for r in task.rows("train")} == {("i feel", 0), ("he goes", 1)}
    write(tmp_path / "TREC/train_5500.label", "DESC:manner How ?\nABBR:exp What is \xe9 ?\n".encode("latin-1"))
    write(tmp_path / "TREC/TREC_10.label", "NUM:dist How far ?\n")
    trec = load("trec", tmp_path)
    assert [(r.text, r.label) for r in trec.rows("train")] == [("How ?", 0), ("What is \xe9 ?", 2)]


def test_official_topics_count_from_one(tmp_path):
    write(tmp_path / "ag_news_csv/train.csv", '"3","Title","Body, ""quoted"""\n"1","T","B\\n"\n')
    write(tmp_path / "ag_news_csv/test.csv", '"4","T","B"\n')
    task = load("agnews", tmp_path)
    assert [(r.text, r.label) for r in task.rows("train")] == [('Title Body, "quoted"', 2), ("T B\\n", 0)]
    write(tmp_path / "ag_news_csv/test.csv", "text,label\nx,0\n")
    with pytest.raises(DataError, match="expected a label from 1 to 4"):
        load("agnews", tmp_path)


def test_imdb_folders(tmp_path):
    for split in ("train", "test"):
        for name in ("pos", "neg"):
            for number in (10, 9):
                write(tmp_path / f"aclImdb/{split}/{name}/{number}_7.txt", f"{name} {number}")
    task = load("imdb", tmp_path)
    assert [r.id for r in task.rows("train")][:2] == ["imdb/train/neg/9_7", "imdb/train/neg/10_7"]
    assert balance(task, "test") == {0: 2, 1: 2}


def test_conll(tmp_path):
    text = "-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\nPeter NNP I-NP B-PER"
    for name in ("train.txt", "valid.txt", "test.txt"):
        write(tmp_path / "conll2003" / name, text)
    task = load("conll", tmp_path)
    assert task.kind == "tokens"
    assert [(r.words, r.label) for r in task.rows("train")] == [(("EU", "rejects"), (3, 0)), (("Peter",), (1,))]
    assert task.rows("train")[0].group == "document 1"


def test_anli_and_hans(tmp_path):
    for name in ("train", "dev", "test"):
        for turn in ("R1", "R2"):
            line = json.dumps({"uid": "u", "context": "C", "hypothesis": f"H {turn}", "label": "n"})
            write(tmp_path / f"anli_v1.0/{turn}/{name}.jsonl", line + "\n")
    task = load("anli", tmp_path)
    assert [(r.id, r.label) for r in task.rows("test")] == [("anli/test/R1/0", 2), ("anli/test/R2/0", 2)]
    header = "gold_label\tsentence1\tsentence2\tpairID\n"
    write(tmp_path / "hans/heuristics_train_set.txt", header + "entailment\ta\tb\tex0\nnon-entailment\tc\td\tex1\n")
    assert [r.label for r in load("hans", tmp_path).rows("train")] == [0, 1]


def squad_file(path: Path, articles: int = 12, start: int = 4, title: bool = True) -> Path:
    data = []
    for a in range(articles):
        qas = [
            {
                "id": f"{a}-0",
                "question": " where ? ",
                "is_impossible": False,
                "answers": [{"text": "Oslo", "answer_start": start}],
            },
            {"id": f"{a}-1", "question": "why ?", "is_impossible": True, "answers": [], "plausible_answers": []},
        ]
        data.append({"paragraphs": [{"context": " in Oslo . ", "qas": qas}]} | ({"title": f"T{a}"} if title else {}))
    return write(path, json.dumps({"version": "v2.0", "data": data}))


def test_squad_keeps_every_character_of_the_context(tmp_path):
    squad_file(tmp_path / "squad/train-v2.0.json")
    squad_file(tmp_path / "squad/dev-v2.0.json", articles=1)
    task = load("squad2", tmp_path)
    row, none = task.rows("validation")
    assert (row.id, row.text, row.pair, row.answers, row.group) == (
        "0-0",
        "where ?",
        " in Oslo . ",
        (("Oslo", 4),),
        "T0",
    )
    assert none.answers == ()
    squad_file(tmp_path / "squad/dev-v2.0.json", start=5)
    with pytest.raises(DataError, match="'Oslo' is not at character 5"):
        load("squad2", tmp_path)


def test_a_single_squad_file_is_cut_by_article(tmp_path):
    squad_file(tmp_path / "squad/dev-v2.0.json", title=False)
    task = load("squad2", tmp_path)
    groups = [{r.group for r in rows} for rows in task.splits.values()]
    assert sum(map(len, groups)) == 12
    assert len(set.union(*groups)) == 12


def test_folder_names_in_any_case_and_several_places(tmp_path, monkeypatch):
    write(tmp_path / "a/keep", "")
    write(tmp_path / "b/GLUE/sst-2/train.tsv", "sentence\tlabel\nfine\t1\n")
    write(tmp_path / "b/GLUE/sst-2/dev.tsv", "sentence\tlabel\npoor\t0\n")
    task = load_task(DataConfig(task="sst2", data_dir=(tmp_path / "a", tmp_path / "b")))
    assert task.rows("train")[0].text == "fine"
    monkeypatch.setenv("BUDWOOD_DATA", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert load_task(DataConfig(task="sst2")).digest == task.digest


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("train.tsv", "text\tlabel\nfine\t1\n", "has no column 'sentence'"),
        ("train.tsv", "sentence\tlabel\nfine\tgood\n", "has the label 'good'"),
        ("train.tsv", b"sentence\tlabel\nfin\xe9\t1\n", r"is not UTF-8: byte 18 is 0xe9.*iconv"),
        ("train.tsv", "", "is empty"),
        ("train.tsv", "sentence\tlabel\n", "Split 'train' of task 'sst2' is empty"),
        ("other.tsv", "sentence\tlabel\nfine\t1\n", "holds no labelled file of task 'sst2'.*it holds other.tsv"),
        ("tr_inp.pkl", b"\x80\x04]\x94.", "is pickled data"),
    ],
)
def test_damaged_public_files(tmp_path, file, text, message):
    write(tmp_path / "SST-2" / file, text)
    with pytest.raises(DataError, match=message) as caught:
        load("sst2", tmp_path)
    assert "\n" not in str(caught.value)
