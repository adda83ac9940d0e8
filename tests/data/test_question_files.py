"""JSONL and TSV files of questions: what is read, and that every damaged line is named."""

import bz2
import gzip
import json
import random
import re

import pytest

from rag_jax.data.question_files import Example, read_asked
from rag_jax.data.question_sources import load_examples
from rag_jax.errors import DataError


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return str(path)


def message_of(source, kind=ValueError):
    with pytest.raises(kind) as error:
        load_examples(source)
    return str(error.value)


# --- JSONL --------------------------------------------------------------------------------------


def test_jsonl_fields(tmp_path):
    lines = [
        '{"id": "x", "question": " Who? ", "answers": ["A ", "B"], "positive_ids": ["4"], '
        '"hard_negative_ids": ["5", 6], "title": "ignored", "source": null}',
        "",
        '{"question": "caf\\u00e9 \u2028?", "answer": "yes", "negative_ids": ["9"], "id": null}',
        '{"id": 12, "question": "NQ-open form", "answer": ["a"]}',
        '{"question": "r", "answers": ["a|b", "[[c]"], "regex": true, "targets": ["b"], '
        '"titles": ["B (c)"]}',
        '{"question": "s", "answers": ["(a"], "regex": false, "targets": [], "titles": null}',
    ]
    expected = [
        Example("x", "Who?", ("A", "B"), ("4",), ("5", "6")),
        Example("3", "café \u2028?", ("yes",), (), ("9",)),  # U+2028 ends no line
        Example("12", "NQ-open form", ("a",)),
        Example("5", "r", ("a|b", "[[c]"), targets=("b",), regex=True, titles=("B (c)",)),
        Example("6", "s", ("(a",)),
    ]
    text = "\ufeff" + "\r\n".join(lines)
    assert load_examples(write(tmp_path / "a.jsonl", text)) == expected
    packed = gzip.compress(text.encode())
    assert load_examples(write(tmp_path / "a.jsonl.gz", packed)) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q"}', 'no "answers"'),
        ('{"answers": ["a"]}', 'no "question"'),
        ('{"claim": "c", "answers": ["a"]}', "'claim'"),
        ('{"question": 3, "answers": ["a"]}', '"question" is 3'),
        ('{"question": " ", "answers": ["a"]}', '"question" is " ": expected a string with'),
        ('{"question": "q", "answers": []}', "no answers"),
        ('{"question": "q", "answers": ["a", " "]}', r"answers\[1\] is empty"),
        ('{"question": "q", "answers": "a"}', '"answers" is "a": expected a list'),
        ('{"question": "q", "answers": ["a", 1]}', "expected a list of strings"),
        ('{"question": "q", "answer": {"a": 1}}', "expected a list of strings"),
        ('{"question": "q", "answers": ["a"], "answer": "a"}', 'both "answers" and "answer"'),
        ('{"question": "q", "answers": ["a"], "id": true}', '"id" is true: expected a str'),
        ('{"question": "q", "answers": ["a"], "id": ""}',
         '"id" is "": expected a string with some text in it, or an integer'),
        ('{"question": "q", "answers": ["a"], "positive_ids": "7"}', "expected a list of passage"),
        ('{"question": "q", "answers": ["a"], "positive_ids": [null]}', r'_ids" is \[null\]'),
        ('{"question": "q", "answers": ["a"], "negative_ids": [1], "hard_negative_ids": []}',
         'both "hard_negative_ids" and "negative_ids"'),
        ('{"question": "q", "answers": ["a"], "positive_ids": [1], "negative_ids": ["1"]}',
         "passage '1' is named as positive and as negative"),
        ('{"question": "q", "answers": ["a", "(b"], "regex": true}',
         r"answers\[1\], '\(b', is not a regular expression"),
        ('{"question": "q", "answers": ["a{9999999999}"], "regex": true}', "not a regular expr"),
        ('{"question": "q", "answers": ["(?a)(?u)a"], "regex": true}', "not a regular expr"),
        ('{"question": "q", "answers": ["a"], "regex": 1}', "regex is 1: expected true or false"),
        ('{"question": "q", "answers": ["a"], "targets": "b"}', '"targets" is "b": expected a li'),
        ('{"question": "q", "answers": ["a"], "targets": [""]}', r"targets\[0\] is empty"),
        ('{"question": "q", "answers": ["a"], "titles": [3]}', '"titles" is'),
        ('{"question": "\\ud800", "answers": ["a"]}', "surrogate"),
        ('["q", "a"]', "a JSON list"),
        ("[" * 100_000, "not JSON"),
        ("question\tanswer", "not JSON"),
    ],
)  # fmt: skip
def test_jsonl_errors_name_file_line_and_field(tmp_path, line, message):
    good = '{"question": "q", "answers": ["a"]}\n'
    path = write(tmp_path / "bad.jsonl", good * 2 + line + "\n" + good)
    error = message_of(path)
    assert error.startswith(f"{path}:3: ")
    assert re.search(message, error)


def test_duplicate_ids_name_both_lines(tmp_path):
    line = '{"id": "same", "question": "q", "answers": ["a"]}\n'
    path = write(tmp_path / "twice.jsonl", line * 2)
    assert message_of(path).startswith(f"{path}:2: id 'same' was already used at {path}:1")


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.tsv"])
def test_files_without_examples_are_errors(tmp_path, name):
    for text in ("", "\n \n"):
        assert "no examples" in message_of(write(tmp_path / name, text))


def test_unreadable_sources(tmp_path):
    assert "expected a file ending in .jsonl" in message_of("questions.txt")
    assert "no file" in message_of(str(tmp_path / "no.jsonl"), FileNotFoundError)
    whole = gzip.compress(b'{"question": "q", "answers": ["a"]}\n' * 100)
    for damaged in (whole[:-20], b"no gzip", whole[:20] + b"\xff" * 20 + whole[40:]):
        path = write(tmp_path / "bad.jsonl.gz", damaged)
        assert re.match(re.escape(path) + r":\d+: damaged file", message_of(path))


# --- TSV ----------------------------------------------------------------------------------------


def test_tsv_forms(tmp_path):
    text = (
        "Question\tAnswers\n"
        "who\t['Lima', \"Côte d'Ivoire\"]\n"  # Python's literal
        'what\t["a", "b"]\n'  # JSON's
        "where\tA\tB [sic]\tC\n"
        'when\t"[""June 5"", \'x\']"\n'  # as the csv module quotes it
        '"quoted ""q"" whole"\t1 "one"\n'
        "\"Hello\" who sang it\t['\\d+']\r\n"
    )
    expected = [
        Example("2", "who", ("Lima", "Côte d'Ivoire")),
        Example("3", "what", ("a", "b")),
        Example("4", "where", ("A", "B [sic]", "C")),
        Example("5", "when", ("June 5", "x")),
        Example("6", 'quoted "q" whole', ('1 "one"',)),
        Example("7", '"Hello" who sang it', ("\\d+",)),
    ]
    for name in ("nq.tsv", "nq.csv"):
        assert load_examples(write(tmp_path / name, text)) == expected
    packed = gzip.compress(text.encode())
    assert load_examples(write(tmp_path / "nq.tsv.gz", packed)) == expected
    for header in ("question\tanswers", "Question\tAnswer", "question\tanswer 1\tanswer 2"):
        path = write(tmp_path / "headed.tsv", f"{header}\nwho\tLima\n")
        assert load_examples(path) == [Example("2", "who", ("Lima",))]
        assert read_asked(path) == [("2", "who")]


def test_a_column_that_is_no_answer_is_refused_and_not_an_answer(tmp_path):
    """Of question, answer and category, every category was an accepted answer."""
    for header, column in (("question\tanswer\tcategory", "category"), ("Question\tid\tref", "id")):
        path = write(tmp_path / "q.tsv", f"{header}\nWho?\tAna\tx\n")
        with pytest.raises(DataError, match=rf"q\.tsv:1: the column '{column}': all columns after"):
            load_examples(path)
        assert read_asked(path) == [("2", "Who?")], "no answers are read"
    for header in ("answer_1\tAnswer 2\t", "answers[0]\tanswers[1]", "answer\tanswer.1"):
        several = write(tmp_path / "q.tsv", f"question\t{header}\nWho?\tAna\tEva\t\n")
        assert load_examples(several) == [Example("2", "Who?", ("Ana", "Eva"))]
    alone = write(tmp_path / "q.tsv", "question\tgold\nWho?\tAna\n")
    assert load_examples(alone) == [Example("2", "Who?", ("Ana",))]


def test_a_table_may_fill_short_rows_up_with_empty_fields(tmp_path):
    """So a spreadsheet writes questions with few answers, and no cell of it can be removed."""
    path = write(tmp_path / "q.tsv", 'who\tLima\tQuito\nwhere\tPeru\t\nwhat\t["a", "b"]\t\t\n')
    assert [e.answers for e in load_examples(path)] == [("Lima", "Quito"), ("Peru",), ("a", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("who,Lima", "no tab"),
        ("who\t", r"answers\[0\] is empty"),
        ("who\t\t", r"answers\[0\] is empty"),
        ("who\tLima\t\tQuito", r"answers\[1\] is empty"),
        ("\tLima", "question is empty"),
        ("who\t[]", "no answers"),
        ("who\t['a', 'b'", "not a list of strings"),
        ("who\t'a', 'b']", "not a list of strings"),
        ("who\t['a' 'b']", "not a list of strings"),  # for Python, "ab"
        ("who\t['a']who\t['b']", "not a list of strings"),
        ("who\t[1, 2]", "not a list of strings"),
        ("who\t['a'] + ['b']", "not a list of strings"),
        ("who\t[__import__('os').getcwd()]", "not a list of strings"),
        ("who\t" + "[" * 10_000, "not a list of strings"),
    ],
)
def test_tsv_errors_name_file_line_and_field(tmp_path, line, message):
    path = write(tmp_path / "bad.tsv", f"q\ta\n{line}\nq\ta\n")
    error = message_of(path)
    assert error.startswith(f"{path}:2: ")
    assert re.search(message, error)


@pytest.mark.parametrize("read", [load_examples, read_asked])
def test_a_file_of_passages_is_no_file_of_questions(tmp_path, read):
    """A run trained to its end, and was evaluated on the "questions" id, 1 and 7."""
    for text in ("id\ttext\ttitle\n1\tLima is the capital.\tPeru\n",
                 "Text\tID\tTitle\nLima is the capital.\t1\tPeru\n"):
        path = write(tmp_path / "p.tsv", text)
        with pytest.raises(DataError, match=r"p\.tsv:1: the header of a file of passages"):
            read(path)


@pytest.mark.parametrize("read", [load_examples, read_asked])
def test_a_header_whose_first_column_is_no_question_is_refused(tmp_path, read):
    """Every id was asked as a question, and the question was its answer."""
    for header in ("id\tquestion\tanswers", "ID\tQuestion\tAnswer", "id\tquestions\tanswers"):
        path = write(tmp_path / "q.tsv", f"{header}\n1\tWho?\tAna\n")
        with pytest.raises(DataError, match=r"q\.tsv:1: a header with other columns before"):
            read(path)
    with pytest.raises(DataError, match=r"\.jsonl"):
        read(write(tmp_path / "q.json", '{"question": "Who?"}'))


@pytest.mark.parametrize("read", [load_examples, read_asked])
def test_the_first_line_with_content_alone_may_be_a_header(tmp_path, read):
    """After an empty line a header was a question, and a question was a header on any line."""
    table = "\nquestion\tanswers\nWhat does Jeopardy give first?\tanswer\tquestion\n"
    first, *rest = read(write(tmp_path / "q.tsv", table))
    assert first[:2] == ("3", "What does Jeopardy give first?") and not rest


@pytest.mark.parametrize("read", [load_examples, read_asked])
@pytest.mark.parametrize("name, text", [
    ("q.csv", "Who rules Peru?,Lima\n"), ("q.csv", '"Who, then?",Quito\n'),
    ("q.tsv", "question,answer\nWho rules Peru?,Lima\n"),
    ("q.tsv", "Question;Answer\nWho rules Peru?;Lima\n"),
])
def test_a_table_without_tabs_is_refused(tmp_path, read, name, text):
    """Its lines were asked as they are, header and answers included."""
    with pytest.raises(DataError, match=rf"{re.escape(name)}:1: no tab: "):
        read(write(tmp_path / name, text))


@pytest.mark.parametrize("text, expected", [
    ('question,answer\nWho?,Lima\n"Who, ""then""?","a, b"\n',
     [("2", "Who?", "Lima"), ("3", 'Who, "then"?', "a, b")]),
    ("\ufeffQuestion;Answer 1;answer_2\r\nWho?;Lima;Quito\r\n\r\nWhat?;x;\r\nHow?;;y\r\n",
     [("2", "Who?", "Lima", "Quito"), ("4", "What?", "x"), ("5", "How?", "y")]),
    ('answers,id,question\n"[""a"", ""b""]",q7,"Who\n\nis it?"\nc, 8 , When? \n,,\n',
     [("q7", "Who\n\nis it?", "a", "b"), ("8", "When?", "c")])])
def test_a_csv_whose_header_names_its_columns_is_read(tmp_path, text, expected):
    """What every spreadsheet writes was refused for having no tabs."""
    file = write(tmp_path / "q.csv", text)
    assert [(e.id, e.question, *e.answers) for e in load_examples(file)] == expected
    assert read_asked(file) == [row[:2] for row in expected]


@pytest.mark.parametrize("text, told", [
    ("question,answer\nWho?,Lima,Quito\n", "csv:2: the header has 2 fields, and this row 3: a fi"),
    ("question,answer\nWho?\n", "csv:2: the header has 2 fields, and this row 1: a field with ','"),
    ('question,answer\nWho?,x\n"Who" is it?,Lima\n', "csv:3: ',' expected after '\"': a field"),
    ('question,answer\nWho?,x\n"Who\nis it?,Lima\n', "csv:3: unexpected end of data"),
    ("question,answer,place\nWho?,Lima,Peru\n", "csv:1: the column 'place': expected question"),
    ('"a,question",answer\nWho?,x\n', "csv:1: the columns 'a,question, answer': expected question"),
    ("id,question\n1,Who?\n", "csv:1: no column of answers: expected question, answer"),
    ("question,answer\nWho?,\n", r"csv:2: answers\[0\] is empty"),
    ("question,answer\n", "no examples in it"),
    ("id,question,answer\n,Who?,x\n", "csv:2: id is empty")])
def test_a_csv_that_is_damaged_is_refused_by_its_line(tmp_path, text, told):
    with pytest.raises(DataError, match=told):
        load_examples(write(tmp_path / "q.csv", text))


def test_a_question_alone_may_have_commas(tmp_path):
    """A spreadsheet quotes it; in a .tsv nothing else can be meant."""
    for name, line in (("q.csv", '"Who, then?"'), ("q.csv", "Who, then?"), ("q.tsv", "Who, then?")):
        assert read_asked(write(tmp_path / name, f"question\n{line}\n")) == [("2", "Who, then?")]


@pytest.mark.parametrize("read", [load_examples, read_asked])
@pytest.mark.parametrize("text", ['"Who\tis it?"\tLima\n', '"Who\nis it?"\tLima\n',
                                  'Who?\t"Li\nma"\tQuito\n'])
def test_a_quoted_tab_or_line_break_tears_no_question(tmp_path, read, text):
    """Half of a question was asked, and the other half was its answer, or another question."""
    with pytest.raises(DataError, match=r"q\.tsv:1: (.* is closed in another field|no tab)"):
        read(write(tmp_path / "q.tsv", text))


@pytest.mark.parametrize("text", ['"Weird Al, who is it?\tYankovic\nWho?\tLima\n',
                                  'How wide?\t"15\nWho?\tLima\n', 'Who?\t"Bob" said "hi\n'])
def test_a_quote_that_no_other_field_closes_is_of_the_text(tmp_path, text):
    question, *answers = text.split("\n")[0].split("\t")
    assert load_examples(write(tmp_path / "q.tsv", text))[0][1:3] == (question, tuple(answers))


def damaged_jsonl(rng):
    """One line that is damaged for certain."""
    record = {"question": "Where is Lima, é?", "answers": ["Peru", "Perú"], "positive_ids": ["1"]}
    line = json.dumps(record, ensure_ascii=False).encode()
    kind = rng.randrange(5)
    if kind == 0:  # cut short: an object without its end is never JSON
        return line[: rng.randrange(1, len(line))]
    if kind == 1:  # a byte that UTF-8 never has
        at = rng.randrange(len(line))
        return line[:at] + bytes([rng.randrange(0xF8, 0x100)]) + line[at:]
    if kind == 2:
        del record[rng.choice(["question", "answers"])]
    elif kind == 3:
        record[rng.choice(["question", "answers", "positive_ids"])] = rng.choice(
            [{}, 1.5, True, "", [[]], [""], [None], [{}]]
        )
    else:
        return line + rng.choice([b"}", b",", b" x", line])
    return json.dumps(record).encode()


def damaged_tsv(rng):
    """One line that is damaged for certain."""
    line = "Where is Lima, é?\t['Peru', 'Perú']".encode()
    kind = rng.randrange(4)
    if kind == 0:  # cut short before the list is closed
        return line[: rng.randrange(1, len(line))]
    if kind == 1:
        at = rng.randrange(len(line))
        return line[:at] + bytes([rng.randrange(0xF8, 0x100)]) + line[at:]
    if kind == 2:
        return line.replace(b"\t", rng.choice([b" ", b",", b";"]))
    return rng.choice([b"\tPeru", b"Where?\t", b"Where?\t[]", b"Where?\t['a', 2]", b"Q\ta\t\tb"])


@pytest.mark.parametrize(
    ("name", "good", "damaged"),
    [
        ("fuzz.jsonl", b'{"question": "q", "answer": "a"}', damaged_jsonl),
        ("fuzz.tsv", b"q\ta", damaged_tsv),
    ],
)
def test_every_damaged_line_is_named(tmp_path, name, good, damaged):
    """No damage may pass for an example, or end in an error that does not say where."""
    rng = random.Random(0)
    for _ in range(150):
        lines = [good] * rng.randrange(1, 5)
        at = rng.randrange(len(lines))
        lines[at] = damaged(rng)
        path = write(tmp_path / name, b"\n".join(lines))
        assert message_of(path).startswith(f"{path}:{at + 1}: "), lines[at]


@pytest.mark.parametrize("name", ["q.JSONL", "q.jsonl.bz2", "q.jsonl.gz"])
def test_questions_of_json_are_read_as_such_whatever_packs_them(tmp_path, name):
    """Each line, braces and all, was asked as a question."""
    content = b'{"id": "a", "question": "Who?"}\n'
    pack = {"bz2": bz2.compress, "gz": gzip.compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(pack(content))
    assert read_asked(str(tmp_path / name)) == [("a", "Who?")]
