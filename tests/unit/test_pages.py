"""The page table against a model that keeps each sequence's tokens in a list of its own."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbench.engine.pages import Copy, PageTable, StoreFull
from kvbench.formats import pages_for


class Sharing(RuleBasedStateMachine):
    """Add, append, fork, truncate and free in any order: nobody's tokens ever change, and no page is lost."""

    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(1, 8))
    def start(self, page_size: int, num_pages: int) -> None:
        self.table = PageTable(page_size, num_pages)
        self.memory = [[-1] * page_size for _ in range(num_pages)]
        self.model: dict[int, list[int]] = {}
        self.written = 0

    def copy(self, pages: Copy | None) -> None:
        if pages is not None:
            self.memory[pages[1]] = list(self.memory[pages[0]])

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def add(self) -> None:
        self.model[self.table.add()] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(0, 9))
    def append(self, data: st.DataObject, n: int) -> None:
        seq = self.some(data)
        try:
            self.table.reserve(seq, n)
        except StoreFull:
            return
        for _ in range(n):
            page, offset = divmod(self.table.length(seq), self.table.page_size)
            self.memory[self.table.pages(seq)[page]][offset] = self.written
            self.table.commit(seq, 1)
            self.model[seq].append(self.written)
            self.written += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(0, 9))
    def reserve_only(self, data: st.DataObject, n: int) -> None:
        try:
            self.table.reserve(self.some(data), n)
        except StoreFull:
            return

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.some(data)
        try:
            child, pages = self.table.fork(seq)
        except StoreFull:
            return
        self.copy(pages)
        self.model[child] = list(self.model[seq])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.some(data)
        length = data.draw(st.integers(0, len(self.model[seq])))
        try:
            self.copy(self.table.truncate(seq, length))
        except StoreFull:
            return
        del self.model[seq][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.some(data)
        self.table.free(seq)
        del self.model[seq]

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        size = self.table.page_size
        assert sorted(self.model) == self.table.sequences()
        for seq, expected in self.model.items():
            slots = [slot for page in self.table.pages(seq) for slot in self.memory[page]]
            assert self.table.length(seq) == len(expected)
            assert slots[: len(expected)] == expected
            assert len(self.table.pages(seq)) >= pages_for(len(expected), size)

    @invariant()
    def every_page_is_free_or_counted(self) -> None:
        held = [page for seq in self.model for page in self.table.pages(seq)]
        free = list(self.table.free_pages)
        assert len(set(free)) == len(free)
        assert not set(free) & set(held)
        assert len(free) + len(set(held)) == self.table.num_pages
        assert self.table.refs == [held.count(page) for page in range(self.table.num_pages)]
        assert self.table.entries() == len(held)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
