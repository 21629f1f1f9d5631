"""The time left: by like tasks, never by the mean of all, and what is like none is said and not guessed."""

from kvbench.matrix.cells import Task
from kvbench.records.record import ERROR, OK, Record
from kvbench.run.execute import Plan
from kvbench.run.progress import Bar, Lines, Rest, TimeLeft, duration


def task(runner, variant="", baseline="b", **shape):
    return Task(f"{runner}{variant}{baseline}{shape}", runner, variant, shape, {}, ("c",), baseline)


def record(key, status, seconds):
    error = None if status == OK else {"message": "no memory"}
    return Record(key, "r", 1, status, {}, {}, None, None, {}, {}, {}, None, error, "", seconds)


def of(*tasks):
    return TimeLeft(list(tasks))


def test_the_most_alike_counts_and_never_another_runner():
    storage, long, last = (
        task("storage", batch=1, context=8),
        task("agreement"),
        task("storage", batch=2, context=8),
    )
    left = of(storage, long, last)
    left.finished(storage.key, 2.0, True)
    left.finished(long.key, 600.0, True)
    assert left.rest() == Rest(2.0, 0)  # the mean of all would be 301 s
    same, other_side = task("latency", batch=1, context=8), task("latency", baseline=None, batch=1, context=8)
    other_shape, last = task("latency", batch=4, context=8), task("latency", batch=1, context=8)
    left = of(same, other_side, other_shape, last)
    # Of the other side, where nothing nearer is timed; of this side, whatever its shape; of the same.
    for one, seconds in ((other_side, 10.0), (other_shape, 80.0), (same, 7.0)):
        left.finished(one.key, seconds, True)
        assert left.of(last) == seconds
    a, b, c = task("mcq", "mmlu 0-shot"), task("mcq", "cloze 0-shot"), task("mcq", "cloze 0-shot", None)
    left = of(a, b, c)
    for one, seconds, rest in ((a, 30.0, 60.0), (b, 5.0, 5.0)):  # another variant only before its own
        left.finished(one.key, seconds, True)
        assert left.rest() == Rest(rest, 0)


def test_what_is_like_nothing_is_counted_apart_an_error_times_nothing_and_a_task_goes_by_its_rate():
    todo = [task("storage"), task("storage", baseline=None), task("mcq", "cloze"), task("agreement")]
    left = of(*todo)
    assert left.rest() == Rest(None, 4)
    assert str(left.rest()) == "4 tasks not timed yet"
    left.finished(todo[0].key, 50.0, True)
    assert left.rest() == Rest(50.0, 2)
    assert str(left.rest()) == "about 50 s left, and 2 tasks not timed yet"
    left = of(todo[0], todo[2], task("mcq", "cloze", None))
    left.finished(todo[2].key, 40.0, True)  # tasks end in any order
    assert left.rest() == Rest(40.0, 1)
    left = of(*todo[:2])
    left.finished(todo[0].key, 0.01, False)
    assert left.rest() == Rest(None, 1)
    todo = [task("mcq", baseline=None), task("mcq"), task("mcq", "other")]
    left = of(*todo)
    left.finished(todo[0].key, 100.0, True)
    for elapsed, share, own in ((10.0, 0.0, 90.0), (150.0, 0.0, 0.0), (10.0, 0.25, 30.0), (10.0, 1.0, 0.0)):
        assert left.rest(todo[1], elapsed, share) == Rest(own + 100.0, 0)


def test_off_a_terminal_each_task_is_one_line_and_seconds_have_the_unit_that_fits(capsys):
    texts = {0.4: "0 s", 89.4: "89 s", 90: "2 min", 5399: "90 min", 5400: "1.5 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
    todo = (task("storage", batch=1, context=8), task("storage", batch=2, context=8), task("mcq", "cloze"))
    lines = Lines()
    lines.start(Plan(todo, (task("parity"),)))
    ends = ((OK, 3.0), (ERROR, 1.0), (OK, 2.0))
    for index, (one, (status, seconds)) in enumerate(zip(todo, ends, strict=True), start=2):
        lines.task(index, one, "int8_sym")
        lines.inside(1, 2, "halfway")
        lines.finished(record(one.key, status, seconds))
    lines.close()
    assert capsys.readouterr().err.splitlines() == [
        "1 of 4 tasks are already measured and are reused",
        "[2/4] storage: int8_sym: ok in 3.0 s, about 3 s left, and 1 task not timed yet",
        "[3/4] storage: int8_sym: error: no memory in 1.0 s, 1 task not timed yet",
        "[4/4] mcq cloze: int8_sym: ok in 2.0 s",
    ]


def test_the_bar_shows_the_task_by_its_own_rate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvbench.run.progress.time.monotonic", lambda: now[0])
    todo = (task("mcq", "cloze"), task("mcq", "cloze", None), task("storage"))
    bar = Bar()
    bar.start(Plan(todo, ()))
    try:
        bar.task(1, todo[0], "int8_sym")
        bar.finished(record(todo[0].key, OK, 60.0))
        bar.task(2, todo[1], "native")
        matrix, one = bar._bar.tasks
        assert matrix.fields["left"] == "about 60 s left, and 1 task not timed yet"
        now[0] += 10
        bar.inside(1, 5, "questions")
        assert (one.description, one.fields["left"]) == ("mcq cloze: native questions", "about 40 s left")
        assert matrix.fields["left"] == "about 40 s left, and 1 task not timed yet"
        bar.finished(record(todo[1].key, OK, 20.0))
        assert (matrix.completed, matrix.fields["left"]) == (2, "1 task not timed yet")
    finally:
        bar.close()
