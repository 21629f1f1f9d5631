"""Which pages belong to which sequence: a free list, reference counts and a page table. No tensors.

A sequence is resident (it holds pages) or swapped (it keeps its length and holds none). Only `swap_in` and
`discard` accept a swapped one. A partly filled page is never shared, so `fork` and `truncate` may return one
(source, target) page that the owner of the tensors must copy.
"""

from collections import deque

from kvbench.errors import KvbenchError
from kvbench.formats.kv import pages_for

Copy = tuple[int, int]

RESIDENT, SWAPPED = "resident", "swapped"


class StoreFull(KvbenchError):
    """More pages were asked for than are free."""


class PageTable:
    """Pages 0 .. num_pages - 1 of page_size tokens, and the sequences that hold them."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.free_pages: deque[int] = deque(range(num_pages))
        self.refs: list[int] = [0] * num_pages
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0
        self.version = 0  # changes whenever a sequence's pages do

    def add(self) -> int:
        """A new empty sequence's id; ids are never used twice."""
        seq, self._next = self._next, self._next + 1
        self._pages[seq], self._lengths[seq] = [], 0
        return seq

    def free(self, seq: int) -> None:
        if self.state(seq) == SWAPPED:
            raise KvbenchError(
                f"Refusing to free swapped pages: sequence {seq} has its {self.length(seq)} tokens on the "
                "host. Swap it in first, or discard what was swapped."
            )
        self._release(self.pages(seq))
        del self._pages[seq], self._lengths[seq]

    def swap_out(self, seq: int) -> None:
        """Resident to swapped: its pages are released, and a shared one stays with whoever else holds it."""
        self._release(self.pages(seq))
        del self._pages[seq]

    def swap_in(self, seq: int) -> list[int]:
        """Give a swapped sequence new pages. StoreFull, and still swapped, when there are not enough."""
        self.expect_swapped(seq)
        needed = pages_for(self.length(seq), self.page_size)
        self._pages[seq] = self._take(needed, f"swapping in sequence {seq}")
        self.version += 1
        return self._pages[seq]

    def discard(self, seq: int) -> None:
        """Forget a swapped sequence."""
        self.expect_swapped(seq)
        del self._lengths[seq]

    def fork(self, seq: int) -> tuple[int, Copy | None]:
        """A sequence with the same content: full pages are shared, a partly filled one must be copied."""
        pages, length = self.pages(seq), self.length(seq)
        full = length // self.page_size
        shared, copy = pages[:full], None
        if length % self.page_size:
            copy = (pages[full], self._take(1, f"a fork of sequence {seq}")[0])
        for page in shared:
            self.refs[page] += 1
        child = self.add()
        self._pages[child] = shared + ([copy[1]] if copy else [])
        self._lengths[child] = length
        return child, copy

    def truncate(self, seq: int, length: int) -> Copy | None:
        """Keep the first `length` tokens. A last page that is then partly used and shared must be copied."""
        if not 0 <= length <= self.length(seq):
            raise ValueError(
                f"Sequence {seq} has {self.length(seq)} tokens and cannot be truncated to {length}; give a "
                f"length from 0 to {self.length(seq)}."
            )
        pages = self.pages(seq)
        keep = pages_for(length, self.page_size)
        copy = None
        if length % self.page_size and self.refs[pages[keep - 1]] > 1:
            copy = (pages[keep - 1], self._take(1, f"truncating sequence {seq}")[0])
            self.refs[copy[0]] -= 1
            pages[keep - 1] = copy[1]
        self._release(pages[keep:])
        del pages[keep:]
        self.version += 1
        self._lengths[seq] = length
        return copy

    def reserve(self, seq: int, n: int) -> None:
        """Take the pages that n more tokens need; StoreFull, and none taken, when too few are free."""
        pages = self.pages(seq)
        missing = pages_for(self.length(seq) + n, self.page_size) - len(pages)
        if missing > 0:
            pages += self._take(missing, f"{n} more tokens of sequence {seq}")
            self.version += 1

    def commit(self, seq: int, n: int) -> None:
        """Count n reserved tokens as written."""
        pages, length = self.pages(seq), self.length(seq) + n
        if n < 0 or length > len(pages) * self.page_size:
            raise ValueError(
                f"Sequence {seq} cannot grow by {n} to {length} tokens: its {len(pages)} pages hold "
                f"{len(pages) * self.page_size}; reserve them first."
            )
        self._lengths[seq] = length

    def sequences(self) -> list[int]:
        return list(self._lengths)

    def state(self, seq: int) -> str:
        """RESIDENT or SWAPPED."""
        return RESIDENT if self._known(seq) in self._pages else SWAPPED

    def length(self, seq: int) -> int:
        return self._lengths[self._known(seq)]

    def pages(self, seq: int) -> list[int]:
        """The sequence's page ids in order, reserved ones included. KvbenchError for a swapped one."""
        if self.state(seq) == SWAPPED:
            raise KvbenchError(
                f"Sequence {seq} is swapped out: its pages are on the host, so nothing can read, write, "
                "share or cut them. Swap it in first."
            )
        return self._pages[seq]

    def expect_swapped(self, seq: int) -> None:
        """KvbenchError for a resident sequence."""
        if self.state(seq) != SWAPPED:
            raise KvbenchError(
                f"Sequence {seq} is resident: there is nothing of it on the host; swap it out first."
            )

    def entries(self) -> int:
        return sum(len(pages) for pages in self._pages.values())

    def _known(self, seq: int) -> int:
        if seq not in self._lengths:
            raise KeyError(f"There is no sequence {seq}; it was never added, or is freed.")
        return seq

    def _take(self, n: int, what: str) -> list[int]:
        if n > len(self.free_pages):
            raise StoreFull(
                f"The KV store is full: {what} needs {n} more page(s) of {self.page_size} tokens, and "
                f"{len(self.free_pages)} of {self.num_pages} are free. Free a sequence, or make the store "
                "larger."
            )
        taken = [self.free_pages.popleft() for _ in range(n)]
        for page in taken:
            self.refs[page] = 1
        return taken

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self.free_pages.append(page)
