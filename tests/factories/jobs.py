"""Commands of kvbench in this process, and what a run leaves."""

import json

from typer.testing import CliRunner

from kvbench.cli.main import app


def kvbench(*words):
    """The result of the command line, in 200 columns."""
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def flat(text):
    return " ".join(text.split())


class Job:
    """A matrix and its gate in a folder, run into `folder/out`."""

    def __init__(self, folder, matrix, gate=""):
        self.folder, self.matrix, self.gate, self.out = (
            folder,
            folder / "m.yaml",
            folder / "gate.yaml",
            folder / "out",
        )
        self.matrix.write_text(matrix)
        self.gate.write_text(gate)

    def __call__(self, *words, command="run"):
        return kvbench(command, self.matrix, "--out", self.out, *words)

    def set(self, *settings, **keys):
        """A run with `--set` of each setting."""
        return self(*(word for setting in settings for word in ("--set", setting)), **keys)

    def judge(self, *words):
        return kvbench("gate", self.out, *words)

    def json(self, name):
        return json.loads((self.out / name).read_text())

    def records(self, **spec):
        """The records by key; of those cells only that have such a spec."""
        found = {p.stem: json.loads(p.read_text()) for p in (self.out / "records").glob("*.json")}
        return {k: r for k, r in found.items() if r["spec"].items() >= spec.items()}

    def of(self, **spec):
        return list(self.records(**spec).values())

    @property
    def page(self):
        return (self.out / "report.html").read_text()
