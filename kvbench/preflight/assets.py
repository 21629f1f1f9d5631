"""The models and evaluation data that kvbench knows by name: place, size, digest, whether they are intact."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.data.corpora import HUB, WIKITEXT_FILES, WIKITEXT_SHA, corpus, file_sha, hub_allowed, local
from kvbench.data.questions import SOURCES, TASKS, questions
from kvbench.errors import KvbenchError, NotAvailable, UsageError
from kvbench.files import cache_dir
from kvbench.models.attention_facts import facts_from_config
from kvbench.models.catalog import ALIASES, SHAPES, TINY, Alias
from kvbench.models.source import config_facts, fingerprint, kind_of, weight_files

HERE, NOT_HERE, BUILT_IN, FROM_HUB = "here", "not here", "built in", "from the hub"
WHOLE, BROKEN = "whole", "broken"


@dataclass(frozen=True)
class Held:
    """One model, or one file of evaluation data."""

    name: str
    kind: str
    what: str
    state: str  # HERE, NOT_HERE, BUILT_IN or FROM_HUB; of what was verified: WHOLE, BROKEN or NOT_HERE
    where: str = ""
    bytes: int | None = None
    sha256: str | None = None
    get: str = ""  # how to get what is not here, or what to do about it

    def as_text(self) -> str:
        size = f"; {self.bytes:,} B" if self.bytes is not None else ""
        sha = f"; sha256 {self.sha256}" if self.sha256 else ""
        where = f"; {self.where}" if self.where else ""
        get = f"\n    {self.get}" if self.get else ""
        return f"{self.name}: {self.state}; {self.what}{size}{sha}{where}{get}"


def models() -> list[Held]:
    """The models that a matrix can name without a path or a hub id."""
    return [
        *(_alias(name, alias) for name, alias in ALIASES.items()),
        *(_config(name, "tiny", "for tests") for name in TINY),
        *(_config(name, "shape", "for times") for name in SHAPES),
    ]


def alias_path(name: str) -> Path:
    """Where `kvbench.models.download.fetch(name)` keeps the file."""
    return cache_dir() / "models" / name / Path(ALIASES[name].member).name


def _alias(name: str, alias: Alias) -> Held:
    path = alias_path(name)
    here = path.is_file() and path.stat().st_size == alias.member_bytes
    what = f"{alias.package} {alias.version} of the package index, {alias.config['model_type']}"
    state, where = (HERE, str(path)) if here else (NOT_HERE, "")
    get = "" if here else f"kvbench models fetch {name}, or the first run that names it"
    return Held(name, "alias", what, state, where, alias.member_bytes, alias.member_sha256, get)


def _config(name: str, kind: str, use: str) -> Held:
    facts = facts_from_config({**TINY, **SHAPES}[name])
    shape, heads = facts.layers[0].shape, facts.layers[0].q_heads
    model = f"{facts.model_type}, {len(facts.layers)} layers"
    what = f"random weights, {use}: {model}, {heads} heads on {shape.kv_heads} of {shape.head_dim}"
    return Held(name, kind, what, BUILT_IN)


def verify_model(name: str) -> Held:
    """By its sha256 an alias, a folder or file by being complete and supported. UsageError for others."""
    kind = kind_of(name)
    if kind == "alias":
        return _verify_alias(name)
    if kind == "config":
        return next(held for held in models() if held.name == name)
    if kind == "hub":
        raise UsageError(
            f"{name} is on the hub, which verifies files when they are fetched: hf download {name}."
        )
    spec = {"model": name}
    try:
        facts = config_facts(spec)
        digest = fingerprint(spec)
        if kind == "folder" and not weight_files(Path(name).expanduser()):
            raise UsageError("It has neither model.safetensors nor an index of such files; fetch it again.")
    except KvbenchError as e:
        return Held(name, kind, str(e), BROKEN)
    what = f"{facts.model_type}, {len(facts.layers)} layers"
    return Held(name, kind, what, WHOLE, sha256=digest.partition(":")[2])


def _verify_alias(name: str) -> Held:
    alias, path = ALIASES[name], alias_path(name)
    if not path.is_file():
        return _alias(name, alias)
    size, sha, what = path.stat().st_size, file_sha(path), f"{alias.package} {alias.version}"
    if (size, sha) == (alias.member_bytes, alias.member_sha256):
        return Held(name, "alias", what, WHOLE, str(path), size, sha)
    wrong = (
        f"not the pinned {alias.member_bytes:,} B of sha256 {alias.member_sha256}; delete it and fetch it "
        f"again: rm {path} && kvbench models fetch {name}"
    )
    return Held(name, "alias", what, BROKEN, str(path), size, sha, wrong)


def data(data_dir: Path | None) -> list[Held]:
    """Corpora and question sets: the built-in ones, then each file of the layout."""
    return [*_built_in(), *(_file(name, what, path, data_dir) for name, what, path in _layout())]


def data_names() -> tuple[str, ...]:
    return ("pydoc", "instructions", "wikitext2", *TASKS)


def _built_in() -> Iterator[Held]:
    for name in ("pydoc", "instructions"):
        text = corpus(name, None)
        many = f"text of {len(text.documents)} documents: {text.source}"
        yield Held(name, "corpus", many, BUILT_IN, bytes=len(text.text.encode()), sha256=text.sha256)
    cloze = questions("cloze", None)
    many = f"{len(cloze.questions)} questions made from pydoc"
    yield Held("cloze", "questions", many, BUILT_IN, sha256=cloze.sha256)


def _layout() -> Iterator[tuple[str, str, str]]:
    """(name, what it is, its path below the data folder)."""
    for split, file in WIKITEXT_FILES.items():
        yield "wikitext2", f"WikiText-2 raw, {split} split, CC BY-SA 3.0", f"wikitext-2-raw/{file}"
    for name, source in SOURCES.items():
        yield name, f"{source.source}, {source.license}: questions", source.scored
        yield name, "its worked examples", source.shown


def _file(name: str, what: str, relative: str, data_dir: Path | None) -> Held:
    kind = "corpus" if name == "wikitext2" else "questions"
    path = local(data_dir, *relative.split("/"))
    if path is not None:
        return Held(name, kind, what, HERE, str(path), path.stat().st_size, file_sha(path))
    if hub_allowed(data_dir):
        get = f"kvbench data fetch {name}, or the first run that asks for it"
        return Held(name, kind, what, FROM_HUB, get=get)
    get = f"{relative} below --data-dir, or KVBENCH_ALLOW_HUB=1 kvbench data fetch {name}"
    return Held(name, kind, what, NOT_HERE, get=get)


def verify_data(name: str, data_dir: Path | None) -> Held:
    """A set whose files are here, read completely and compared with its published digest. Fetches nothing."""
    due = [one for one in _layout() if one[0] == name]
    if name == "wikitext2":
        due = due[:1]  # the test split; validation is optional
    lacking = [one for one in due if local(data_dir, *one[2].split("/")) is None]
    return _file(*lacking[0], data_dir) if lacking else _read(name, data_dir)


def fetch_data(name: str, data_dir: Path | None) -> Held:
    """The set, fetched into the hub's cache unless it is here. NotAvailable where the hub is not allowed,
    KvbenchError where it does not give the set."""
    held = verify_data(name, data_dir)
    if held.state == NOT_HERE:
        raise NotAvailable(f"{name} is not here, and fetching from the hub is not allowed; {held.get}.")
    if held.state != FROM_HUB:
        return held
    try:
        return _read(name, Path(HUB))
    except KvbenchError:
        raise
    except Exception as e:  # the network's and the hub library's own, of many kinds
        raise KvbenchError(
            f"{name} could not be fetched from the hub ({type(e).__name__}: {str(e)[:200]}); check the "
            "network and HF_HUB_OFFLINE, or put its files below --data-dir: "
            f"{', '.join(path for of, _, path in _layout() if of == name)}."
        ) from e


def _read(name: str, data_dir: Path | None) -> Held:
    if name in TASKS:
        try:
            found = questions(name, data_dir)
        except (KvbenchError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as e:
            return Held(name, "questions", f"it cannot be read: {e}", BROKEN, get="fetch it again")
        many = f"{len(found.questions)} questions, {len({q.subject for q in found.questions})} subjects"
        return Held(name, "questions", many, WHOLE, found.source, sha256=found.sha256)
    splits = ["test"]
    if name == "wikitext2" and local(data_dir, "wikitext-2-raw", WIKITEXT_FILES["validation"]):
        splits.append("validation")
    for split in reversed(splits):  # reports the test split, unless another one is broken
        try:
            text = corpus(name, data_dir, split)
        except UnicodeDecodeError as e:
            what = f"its {split} split cannot be read: {e}"
            return Held(name, "corpus", what, BROKEN, get="fetch it again")
        what = f"{len(text.documents)} documents, {len(text.text):,} characters"
        if name == "wikitext2" and text.sha256 != WIKITEXT_SHA[split]:
            sha = f"not the published bytes, sha256 {WIKITEXT_SHA[split]}"
            wrong = f"{sha}; fetch it again, or name the file as a corpus of your own"
            return Held(name, "corpus", what, BROKEN, text.source, sha256=text.sha256, get=wrong)
    return Held(name, "corpus", what, WHOLE, text.source, sha256=text.sha256)
