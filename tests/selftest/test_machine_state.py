"""A machine that does not hold still, planted: through run, records, metrics and gate, as the self-test's faults are.

These are no faults of its table: they end in exit code 4, where a fault has to fail, and a clean run beside them has to pass on any
machine, also on one that is really slowed down. Here the reader of the device's state and the clock are stand-ins.
"""

from unittest.mock import patch

import pytest

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.runners import latency, timing
from kvbench.selftest import suite
from kvbench.selftest.fault import CELLS

REPEATS = 6
QUIET = {"reasons": ["idle"], "sm_mhz": 1980}
TIMED = f"runners={{storage: {{}}, latency: {{new_tokens: 6, repeats: {REPEATS}, warmup: 1}}}}"


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with suite.quick():
        yield


class Clock:
    """Moves only when an arm works."""

    now = 0.0

    def __call__(self):
        return self.now


class Paced:
    """An arm whose steps take 10 ms, and `growth` as much in each request as in the one before it."""

    growth = 1.0

    def __init__(self, arm, clock, requests):
        self.arm, self.clock, self.requests = arm, clock, requests

    def _work(self, name):
        getattr(self.arm, name)()
        self.clock.now += 0.010 * self.growth ** len(self.requests)

    def submit(self):
        self._work("submit")

    def step(self):
        self._work("step")

    def close(self):
        self.requests.append(None)
        self.arm.close()

    def __getattr__(self, name):
        return getattr(self.arm, name)


def machine(growth=1.0, slow=""):
    """A machine whose requests take `growth` as long each, and that says it is hot while arm `slow` is at work."""

    def measure(arms, *, read_state, **keys):
        clock, requests = Clock(), []
        kind = type("Paced", (Paced,), {"growth": growth})
        places = [name for pair in range(REPEATS) for name, _ in (arms if pair % 2 == 0 else reversed(arms))]
        looks = iter([place for place in places for _ in range(2)])

        def state():
            read_state()
            return {**QUIET, "reasons": ["hw thermal"], "sm_mhz": 1350} if next(looks) == slow else QUIET

        paced = [(name, kind(arm, clock, requests)) for name, arm in arms]
        return timing.measure(paced, read_state=state, clock=clock, **keys)

    return patch.object(latency, "measure", measure)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    monkeypatch.setitem(CELLS, "timed", (TIMED,))

    def run(*checks, **of):
        """What a gate of these checks says of one run, all but which has to pass."""
        path = tmp_path / "gate.yaml"
        entries = (f"{{where: {{kv_format: int8_sym}}, {check}}}" for check in checks)
        path.write_text(f"name: timed\nchecks: [{', '.join(entries)}]\n")
        verdict = suite.judged(suite.measured("timed", lambda: machine(**of)), path)
        always, own = verdict.outcomes[: -len(checks)], list(verdict.outcomes[-len(checks) :])
        assert [o.sentence for o in always if o.status != PASS] == []
        statuses = {o.status for o in own}
        assert verdict.exit_code == (1 if FAIL in statuses else 4 if INCONCLUSIVE in statuses else 0)
        return own

    return run


RATIO_KEPT, RATIO_BROKEN = "metric: itl_ratio, at_most: 1.1", "metric: itl_ratio, at_most: 0.9"
ITL_KEPT, ITL_BROKEN = "metric: itl_ms, at_most: 11", "metric: itl_ms, at_most: 9"
ALL = (RATIO_KEPT, RATIO_BROKEN, ITL_KEPT, ITL_BROKEN)


def test_on_a_machine_that_holds_still_checks_are_what_they_are(judged):
    assert [o.status for o in judged(*ALL)] == [PASS, FAIL, PASS, FAIL]


def test_a_hot_candidate_fails_nothing_and_the_cause_is_named(judged):
    found = judged(*ALL, slow="candidate")
    assert [o.status for o in found] == [PASS, INCONCLUSIVE, PASS, INCONCLUSIVE]
    said = "slowed down in 6 of 12 requests under hw thermal (candidate 6, baseline 0), SM 1980 -> 1350 MHz"
    assert all(said in o.sentence for o in found if o.status == INCONCLUSIVE)


def test_a_hot_baseline_flatters_a_ratio(judged):
    found = judged(*ALL, slow="baseline")
    assert [o.status for o in found] == [INCONCLUSIVE, FAIL, PASS, FAIL]
    assert "(candidate 0, baseline 6)" in found[0].sentence


def test_times_that_grow_from_request_to_request_are_none_of_a_steady_machine(judged):
    """Of 1.03 a request A B B A leaves nothing in the ratio; the last request keeps a limit that is far away."""
    near, far = "metric: itl_ms, at_most: 14", "metric: itl_ms, at_most: 100"
    found = judged(near, far, ITL_BROKEN, "metric: itl_ratio, at_most: 1.5", growth=1.03)
    assert [o.status for o in found] == [INCONCLUSIVE, PASS, FAIL, PASS], [o.sentence for o in found]
    assert "ITL drifts by +38.4%" in found[0].sentence
