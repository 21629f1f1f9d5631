"""The strict YAML loader: types by YAML 1.2 core, faults with their places, all at once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.matrix.document import ConfigError
from kvbench.matrix.yaml import Problems, load, parse, read, scalar


def faults(text):
    """The whole message of a text that must not load."""
    with pytest.raises(UsageError) as caught:
        Problems(parse(text, "f.yaml")).raise_if_any()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1e5", 1e5), ("1e+5", 1e5), ("1.0e5", 1e5), ("1.0e-5", 1e-5), ("1.0e+5", 1e5),
        ("010", 10), ("-3", -3), ("+7", 7), ("0o10", 8), ("0xff", 255), (".5", 0.5), ("1.", 1.0),
        ("-.inf", -math.inf), (".INF", math.inf), ("true", True), ("FALSE", False), ("~", None), ("", None),
        ("null", None), ("Null", None),
        *((text, text) for text in ("yes", "no", "on", "off", "NO", "y", "12:30", "1_000", "2026-01-31", "nan",
                                    "inf", "1e", "-", "tRue", "0b1", ".", "1.2.3", "٣")),
    ],
)  # fmt: skip
def test_a22_t1_t2_scalars_by_yaml_1_2_core(text, value):
    got = scalar(text)
    assert type(got) is type(value)
    assert got == value
    assert text == "-" or parse(f"limit: {text}", "f.yaml").data["limit"] == value


def test_nan_is_a_float_and_quoted_and_block_scalars_are_text_and_on_is_a_key():
    assert math.isnan(parse("x: .nan", "f.yaml").data["x"])
    assert parse("a: '8'\nb: \"true\"\nc: |\n  1\n", "f.yaml").data == {"a": "8", "b": "true", "c": "1\n"}
    assert parse("on: 1\nno: 2\n'3': 4\n", "f.yaml").data == {"on": 1, "no": 2, "3": 4}


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**30), 10**30))
def test_every_number_that_python_writes_reads_back(x):
    assert scalar(repr(x)) == x


TABS = [
    ("axes:\n\tbatch: 1\n", "2:1"), ("a: b\n\tc: d\n", "2:1"), ("a:\t1\n", "1:3"), ("a: {\n\tb: 1}\n", "2:1"),
    ("a:\n  - 1\n\t- 2\n", "3:1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *((text, f"f.yaml:{place}: YAML does not allow a tab") for text, place in TABS),
        *((text, "f.yaml is empty") for text in ("", "# only a comment\n", "---\n", "~\n")),
        ("kv: a\nbatch: 1\nkv: b\n", "f.yaml:3:1: duplicate key kv (first in line 1)"),
        ("a: &x 1\nb: *x\n", "f.yaml:2:4: *x is an alias"),
        ("a: &x [*x]\n", "f.yaml:1:8: *x is an alias"),
        ("<<: {a: 1}\n", "f.yaml:1:1: << is a merge key"),
        ("a: !!str 8\n", "f.yaml:1:4: the tag !!str is"),
        ("a: !!python/object:os.system x\n", "f.yaml:1:4: the tag !!python/object:os.system is"),
        ("!!map {a: 1}\n", "f.yaml:1:1: the tag !!map is"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: a second document starts here"),
        ("1: a\n", "f.yaml:1:1: the key 1 is not text"),
        ("true: a\n", "f.yaml:1:1: the key true is not text"),
        ("{~: a}\n", "f.yaml:1:2: the key ~ is not text"),
        ("? [a]\n: 2\n", "f.yaml:1:3: a list or a mapping cannot be a key"),
        ("a: 1e999\n", "f.yaml:1:4: the number 1e999 is too large for a float"),
        ("a: " + "9" * 5000, "f.yaml:1:4: the number 999999999999... has 5000 digits"),
        ("a: [1, 2\nb: 3\n",
         "f.yaml:2:2: this is not YAML: while parsing a flow sequence, expected ',' or ']'"),
        ("a: 'x\n", "f.yaml:2:1: this is not YAML: "),
        ("a: b: c\n", "f.yaml:1:5: this is not YAML: mapping values are not allowed here."),
        ("a: 1\nb: \x00\n", "f.yaml:2:4: the character U+0000 is not allowed"),
        ("[" * 50 + "]" * 50, "f.yaml:1:22: this is nested deeper than 20 levels"),
    ],
)  # fmt: skip
def test_a22_t3_what_is_refused_says_where_and_why(text, sentence):
    assert faults(text).startswith(sentence)


def test_faults_inside_a_refused_entry_are_found_too():
    lines = faults("a: 1\na: [1, *x, {b: 1, b: 2}]\n<<: {c: 1e999}\n").splitlines()
    places = ("2:1", "2:8", "2:19", "3:1", "3:9")
    assert [line.split(": ")[0] for line in lines] == [f"f.yaml:{place}" for place in places]


def test_marks_of_values_keys_and_unknown_paths():
    document = parse("axes:\n  batch: [1, '8']\ngate: x\n", "f.yaml")
    assert document.mark(("axes", "batch", 1)) == (2, 14)
    assert document.mark(("axes", "batch")) == (2, 10)
    assert document.mark(("axes", "batch"), key=True) == (2, 3)
    assert document.mark(("axes", "nothing", 3)) == (2, 3)  # the nearest parent
    assert document.where(("gate",)) == "f.yaml:3:7"


def test_problems_are_sorted_merged_and_raised_together():
    document = parse("a: 1\nb: *x\nc: 3\na: 2\n", "f.yaml")
    problems = Problems(document)
    problems.add(("c",), "c is wrong.", "c")
    problems.add(("a",), "a is wrong.", "a")
    problems.add(("a",), "a is wrong.", "a")
    problems.add(("b",), "b is null.", "b")  # the loader made it null, and reported it
    with pytest.raises(ConfigError) as caught:
        problems.raise_if_any()
    found = [(fault.line, fault.column, fault.code) for fault in caught.value.faults]
    assert found == [(1, 4, "a"), (2, 4, "alias"), (3, 4, "c"), (4, 1, "duplicate_key")]
    assert str(caught.value).splitlines()[2] == "f.yaml:3:4: c is wrong."


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing.yaml", r"nothing\.yaml does not exist"), (".", "is a folder"), ("a\0b", "cannot be read"),
     ("latin.yaml", r"latin\.yaml:2:7: the byte 0xe9 is not UTF-8")],
)  # fmt: skip
def test_a_missing_file_a_folder_and_bytes_that_are_no_text(tmp_path, name, words):
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(UsageError, match=words):
        load(tmp_path / name)


def test_bom_and_windows_lines_and_load_raises_what_read_keeps(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("a: 1\na: 2\n")
    assert read(path).data == {"a": 1}
    with pytest.raises(UsageError, match="duplicate key a"):
        load(path)
    path.write_bytes("\ufeffa: 1\r\nb: é\r\n".encode())
    document = load(path)
    assert document.data == {"a": 1, "b": "é"}
    assert document.mark(("b",)) == (2, 4)
    assert len(document.sha) == 64


@given(st.text(max_size=40) | st.text("ab1.e:-[]{},&*!|>'\"#%@`\t\n ~<?=", max_size=60))
def test_any_text_is_read_or_refused_in_a_sentence(text):
    try:
        document = parse(text, "f.yaml")
        Problems(document).raise_if_any()
        said = "f.yaml" if document.data is not None else "nothing"
    except UsageError as e:
        said = str(e)
    assert said.startswith("f.yaml")
