"""What holds of the default policy whatever happens, and where it is the order of last use."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvfs.policy import SMALL, Entry, ExpectedReuse, LeastRecentlyUsed

SIZES = (SMALL - 1, SMALL, 5 * SMALL)
KEYS = 12
"""So few that pages come back."""


class Page:
    __slots__ = ("key", "number", "size")

    def __init__(self, number: int, size: int, key: int) -> None:
        self.number = number
        self.size = size
        self.key = key

    def __repr__(self) -> str:
        return f"{self.number}({self.size})"


class OrderMachine(RuleBasedStateMachine):
    """Pages come, are used, are pinned and leave; a model knows what must be true of them."""

    here: Bundle[Page] = Bundle("here")

    @initialize(percent=st.sampled_from([0, 50, 100]))
    def begin(self, percent: int) -> None:
        self.order: ExpectedReuse[Page] = ExpectedReuse(
            key_of=lambda page: page.key, protected_percent=percent
        )
        self.pages: set[Page] = set()
        self.free: list[int] = []
        self.numbers = itertools.count(1)
        self.parents: dict[Page, Page] = {}
        self.leaders: dict[Page, Page] = {}
        self.pinned: set[Page] = set()

    def make(self, size: int, key: int) -> Page:
        page = Page(self.free.pop() if self.free else next(self.numbers), size, key)
        self.pages.add(page)
        return page

    def note_chain(self, pages: list[Page]) -> None:
        """Small pages and members of groups have no part in chains. Who has a place keeps it."""
        chain = [page for page in pages if page.size >= SMALL and page not in self.leaders]
        for earlier, later in itertools.pairwise(chain):
            if earlier is not later and later not in self.parents and later not in self.parents.values():
                self.parents[later] = earlier

    @rule(target=here, size=st.sampled_from(SIZES), key=st.integers(0, KEYS))
    def add(self, size: int, key: int) -> Page:
        page = self.make(size, key)
        self.order.add(page)
        return page

    @rule(page=here)
    def touch(self, page: Page) -> None:
        if page in self.pages:
            self.order.touch(page)

    @rule(
        some=st.lists(here, max_size=6),
        new=st.lists(st.sampled_from(SIZES), max_size=4),
        together=st.booleans(),
    )
    def use(self, some: list[Page], new: list[int], together: bool) -> None:
        pages = [page for page in some if page in self.pages]
        pages += [self.make(size, KEYS + 1) for size in new]
        if together:
            self.order.use_together(list(dict.fromkeys(pages)))
        else:
            self.order.use(pages)
            self.note_chain(pages)

    @rule(page=here, size=st.sampled_from(SIZES))
    def attach(self, page: Page, size: int) -> None:
        if page in self.pages:
            member = self.make(size, 0)
            self.order.attach(member, page)
            self.leaders[member] = self.leaders.get(page, page)

    @rule(page=here)
    def pin(self, page: Page) -> None:
        if page in self.pages:
            self.order.pin(page)
            self.pinned.add(page)

    @rule(page=here)
    def unpin(self, page: Page) -> None:
        if page in self.pages:
            self.order.unpin(page)
            self.pinned.discard(page)

    @rule(page=consumes(here))
    def remove(self, page: Page) -> None:
        if page in self.pages:
            self.order.remove(page)
            self.gone(page)

    @rule(count=st.integers(1, 8), passed=st.sets(st.integers(0, 8)))
    def evict(self, count: int, passed: set[int]) -> None:
        """Some of what is given is in use and stays."""
        for number, page in enumerate(itertools.islice(self.order.victims(), count)):
            assert page not in self.pinned
            if number not in passed:
                self.order.remove(page, evicted=True)
                self.gone(page)

    def gone(self, page: Page) -> None:
        self.pages.discard(page)
        self.free.append(page.number)
        self.pinned.discard(page)
        self.parents = {one: other for one, other in self.parents.items() if page not in (one, other)}
        self.leaders = {one: other for one, other in self.leaders.items() if page not in (one, other)}

    @invariant()
    def statistics_are_right(self) -> None:
        found = self.order.statistics()
        assert (found.pages, found.bytes) == (len(self.pages), sum(page.size for page in self.pages))
        used = sum(page.size for page in self.pages if page.size >= SMALL and page not in self.leaders)
        assert 0 <= found.protected_bytes <= used

    @invariant()
    def all_but_what_is_pinned_can_leave(self) -> None:
        kept = {self.leaders.get(page, page) for page in self.pinned}
        kept |= {page for page, leader in self.leaders.items() if leader in kept} | self.pinned
        given = list(self.order.victims())
        assert len(given) == len(set(given))
        assert set(given) == self.pages - kept

    @invariant()
    def looking_changes_nothing(self) -> None:
        assert list(self.order.victims()) == list(self.order.victims())

    @invariant()
    def what_comes_later_in_a_chain_leaves_earlier(self) -> None:
        places = {page: place for place, page in enumerate(self.order.victims())}
        for later, earlier in self.parents.items():
            if later in places and earlier in places:
                assert places[later] < places[earlier]

    @invariant()
    def groups_leave_together(self) -> None:
        given = list(self.order.victims())
        for leader in set(self.leaders.values()) & set(given):
            members = {page for page, other in self.leaders.items() if other is leader}
            place = given.index(leader)
            assert set(given[place - len(members) : place]) == members

    def teardown(self) -> None:
        """Everything leaves, however it is chained."""
        if hasattr(self, "order"):
            for page in list(self.pinned):
                self.order.unpin(page)
            for page in self.order.victims():
                self.order.remove(page, evicted=True)
            assert len(self.order) == 0


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


class LinkedPage(Page):
    __slots__ = ("colder", "hotter")

    def __init__(self, number: int, size: int) -> None:
        super().__init__(number, size, number)
        self.colder: Entry | None = None
        self.hotter: Entry | None = None


class FallingMachine(RuleBasedStateMachine):
    """Where the chance of a use falls with age and depends on nothing else, as in the beginning."""

    @initialize()
    def begin(self) -> None:
        self.order: ExpectedReuse[LinkedPage] = ExpectedReuse(
            key_of=lambda page: page.key, protected_percent=100
        )
        self.lru: LeastRecentlyUsed[LinkedPage] = LeastRecentlyUsed()
        self.pages = [LinkedPage(number, SIZES[number % len(SIZES)]) for number in range(1, 20)]

    @rule(numbers=st.lists(st.integers(0, 18), max_size=30))
    def use(self, numbers: list[int]) -> None:
        for number in numbers:
            page = self.pages[number]
            for order in (self.order, self.lru):
                (order.touch if page in order else order.add)(page)

    @rule(count=st.integers(1, 10))
    def evict(self, count: int) -> None:
        for page in itertools.islice(self.lru.victims(), count):
            self.lru.remove(page)
        for page in itertools.islice(self.order.victims(), count):
            self.order.remove(page, evicted=True)

    @invariant()
    def it_is_the_order_of_last_use(self) -> None:
        assert list(self.order.victims()) == list(self.lru.victims())


TestFalling = FallingMachine.TestCase
TestFalling.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
