"""Published tables as files: what is read of them, and what is refused by line."""

from fractions import Fraction

import pytest

from kvbench.errors import UsageError
from kvbench.published.table import read

GOOD = """# title: made
# unit.kv_bytes_total: MiB
# batch: 4
# candidate.splits: auto
metric,context,unit,baseline,candidate,ratio
itl_ms,1024,,7.85,7.27,0.93
itl_ms,4096,s,0.01029,,
kv_bytes_total,,,3.4375,,
kv_bytes_total,,B,3604480,,
"""


def table(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_numbers_are_the_interval_of_what_rounds_to_them(tmp_path):
    made = read(table(tmp_path, GOOD))
    assert made.head == {"title": "made"}
    assert made.settings == {"baseline": {}, "candidate": {"splits": "auto"}}
    first, seconds, mib, exact = made.lines
    assert [line.line for line in made.lines] == [6, 7, 8, 9]
    assert (first.metric, first.unit, first.counts) == ("itl_ms", "ms", {"batch": 4, "context": 1024})
    number = first.numbers["baseline"]
    assert (number.text, number.low, number.high) == ("7.85", Fraction("7.845"), Fraction("7.855"))
    assert first.numbers["ratio"].low == Fraction("0.925")
    number = seconds.numbers["baseline"]
    assert (number.low, number.high) == (Fraction("10.285"), Fraction("10.295"))  # ms
    number = mib.numbers["baseline"]
    assert (number.high - number.low, number.middle) == (Fraction(2**20, 10**4), 3_604_480)
    assert (exact.numbers["baseline"].low, exact.numbers["baseline"].high) == (3_604_480, 3_604_480)
    # only whole bytes are exact
    (line,) = read(table(tmp_path, "metric,unit,baseline\nkv_bytes_total,B,2304.5\n")).lines
    number = line.numbers["baseline"]
    assert (number.low, number.high) == (Fraction("2304.45"), Fraction("2304.55"))
    # a byte order mark, line ends of Windows and empty lines are no matter
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() + b"\r\n,,,,,\r\n")
    assert [line.line for line in read(path).lines] == [6, 7, 8, 9]


ROW = "metric,batch,baseline,candidate\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column names"),
        ("# title: t\n", "no column names"),
        (ROW, "no row"),
        ("# title\n" + ROW + "itl_ms,1,1,1\n", "line 1: '# title'"),
        ("# title: a\n# title: b\n" + ROW + "itl_ms,1,1,1\n", "line 2: duplicate key title"),
        ("# batchs: 1\n" + ROW + "itl_ms,1,1,1\n", r"line 1: key 'batchs' .* Did you mean batch\?"),
        ("# unit.itl: ms\n" + ROW + "itl_ms,1,1,1\n", "line 1: metric 'itl' .* kv_bytes_total"),
        ("# unit.itl_ms: us\n" + ROW + "itl_ms,1,1,1\n", "line 1: unit of itl_ms 'us' .* ms, s"),
        ("# batch: 1.5\n" + ROW + "itl_ms,,1,1\n", "line 1: batch: .* got '1.5'"),
        ("metrik,baseline\nitl_ms,1\n", r"line 1: column 'metrik' .* Did you mean metric\?"),
        ("metric,ratio\nitl_ms,1\n", "line 1: the columns metric, ratio"),
        ("baseline,candidate\n1,1\n", "line 1: the columns baseline, candidate"),
        ("metric,baseline,baseline\nitl_ms,1,1\n", "line 1: duplicate column baseline"),
        (ROW + "itl,1,1,1\n", r"line 2: metric 'itl' .* Did you mean itl_ms\?"),
        (ROW + "itl_ms,1,1\n", "line 2: expected 4 fields .* got 3"),
        (ROW + "itl_ms,1,,\n", "line 2: itl_ms has neither"),
        (ROW + "itl_ms,0,1,1\n", "line 2: batch: .* got '0'"),
        *((f"{ROW}itl_ms,1,{cell},1\n", f"line 2: baseline: expected a number .* got {cell.strip(chr(34))!r}")
          for cell in ("~7", "7 ms", '"1,024"', "nan", "inf", "1e99")),
        (ROW + "itl_ms,1,-7,1\n", "line 2: baseline: .* above 0, got -7"),
        (ROW + "itl_ms,1,0,1\n", "line 2: baseline: .* above 0, got 0"),
        (ROW + "# later: x\nitl_ms,1,1,1\n", "line 2: expected 4 fields"),
        (ROW + 'itl_ms,1,"1,1\n', "cannot be read as CSV"),
        ("# kv_format: int8\n" + ROW + "itl_ms,1,1,1\n", "line 1: kv_format 'int8' .* native, int8_sym"),
        ("{}", "line 1: column '{}'"),
    ],
)  # fmt: skip
def test_what_is_no_such_table_is_refused_by_line(tmp_path, text, words):
    with pytest.raises(UsageError, match=words) as e:
        read(table(tmp_path, text))
    assert "t.csv" in str(e.value)


def test_a_file_that_is_not_there_is_a_folder_or_no_text_is_refused(tmp_path):
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none.csv", "cannot be read"), (".", "cannot be read"), ("b.csv", "not UTF-8")):
        with pytest.raises(UsageError, match=words):
            read(tmp_path / name)
