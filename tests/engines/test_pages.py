"""The page table against a model that keeps each sequence's tokens in a list of its own."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbench.engines.reference.kv.pages import RESIDENT, SWAPPED, PageTable, StoreFull
from kvbench.errors import KvbenchError
from kvbench.formats.kv import pages_for


class Sharing(RuleBasedStateMachine):
    """Add, append, fork, truncate, free and swap in any order: nobody's tokens ever change, and no page is lost.

    model: the tokens of the resident sequences; away: those of the swapped ones.
    """

    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(1, 8))
    def start(self, page_size, num_pages):
        self.table = PageTable(page_size, num_pages)
        self.memory = [[-1] * page_size for _ in range(num_pages)]
        self.model = {}
        self.away = {}
        self.written = 0

    def copy(self, pages):
        if pages is not None:
            self.memory[pages[1]] = list(self.memory[pages[0]])

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def add(self):
        self.model[self.table.add()] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(0, 9))
    def append(self, data, n):
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
    def reserve_only(self, data, n):
        try:
            self.table.reserve(self.some(data), n)
        except StoreFull:
            return

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.some(data)
        try:
            child, pages = self.table.fork(seq)
        except StoreFull:
            return
        self.copy(pages)
        self.model[child] = list(self.model[seq])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        seq = self.some(data)
        length = data.draw(st.integers(0, len(self.model[seq])))
        try:
            self.copy(self.table.truncate(seq, length))
        except StoreFull:
            return
        del self.model[seq][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seq = self.some(data)
        self.table.free(seq)
        del self.model[seq]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_out(self, data):
        seq = self.some(data)
        self.table.swap_out(seq)
        self.away[seq] = self.model.pop(seq)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def swap_in(self, data):
        seq = data.draw(st.sampled_from(sorted(self.away)))
        tokens, size = self.away[seq], self.table.page_size
        try:
            pages = self.table.swap_in(seq)
        except StoreFull:
            return
        assert len(pages) == pages_for(len(tokens), size)
        for at, token in enumerate(tokens):
            self.memory[pages[at // size]][at % size] = token
        self.model[seq] = self.away.pop(seq)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def discard(self, data):
        seq = data.draw(st.sampled_from(sorted(self.away)))
        self.table.discard(seq)
        del self.away[seq]

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def use_what_is_swapped(self, data):
        seq = data.draw(st.sampled_from(sorted(self.away)))
        use = data.draw(st.sampled_from(["pages", "free", "fork", "swap_out"]))
        with pytest.raises(KvbenchError, match="swapped"):
            getattr(self.table, use)(seq)

    @invariant()
    def every_sequence_is_resident_or_swapped(self):
        assert sorted({*self.model, *self.away}) == self.table.sequences()
        for seq in self.table.sequences():
            assert self.table.state(seq) == (SWAPPED if seq in self.away else RESIDENT)
            assert self.table.length(seq) == len((self.model | self.away)[seq])

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        size = self.table.page_size
        for seq, expected in self.model.items():
            slots = [slot for page in self.table.pages(seq) for slot in self.memory[page]]
            assert slots[: len(expected)] == expected
            assert len(self.table.pages(seq)) >= pages_for(len(expected), size)

    @invariant()
    def every_page_is_free_or_counted(self):
        held = [page for seq in self.model for page in self.table.pages(seq)]
        free = list(self.table.free_pages)
        assert len(set(free)) == len(free)
        assert not set(free) & set(held)
        assert len(free) + len(set(held)) == self.table.num_pages
        assert self.table.refs == [held.count(page) for page in range(self.table.num_pages)]
        assert self.table.entries() == len(held)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
