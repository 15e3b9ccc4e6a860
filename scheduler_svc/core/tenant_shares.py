"""How much each tenant was served: tokens run for it, divided by its weight.

A tenant that waited for nothing gains nothing: it joins at the count of the least served that
waits. One that is ahead cannot shed its count by leaving and coming back.

Source: Sheng et al., Fairness in Serving Large Language Models, arXiv:2401.00588, section 4.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.step_plan import Int32Array

MAX_IDLE_ACCOUNTS = 1024
"""Tenants without requests whose counts are remembered; the longest idle goes first."""


class TenantShares:
    """An account per tenant, found by a small number.

    `served[account]` counts tokens over weight. Tokens of prefix hits are free.
    """

    __slots__ = (
        "_free", "_idle", "_last", "_names", "_num_live", "_numbers", "_price", "served",
    )  # fmt: skip

    def __init__(self) -> None:
        self.served: npt.NDArray[np.float64] = np.zeros(0)
        self._price: npt.NDArray[np.float64] = np.zeros(0)
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._num_live: list[int] = []
        self._idle: dict[int, None] = {}
        self._free: list[int] = []
        self._last = 0.0

    def open(self, tenant: str, weight: float) -> int:
        """Return the account of a tenant that has one request more, whose weight holds now."""
        account = self._numbers.get(tenant)
        if account is None:
            account = self._numbers[tenant] = self._new_account(tenant)
        self._idle.pop(account, None)
        self._num_live[account] += 1
        self._price[account] = 1 / weight
        return account

    def close(self, account: int) -> None:
        """Note that a tenant has one request less."""
        self._num_live[account] -= 1
        if self._num_live[account]:
            return
        self._idle[account] = None
        if len(self._idle) > MAX_IDLE_ACCOUNTS:
            longest = next(iter(self._idle))
            del self._idle[longest], self._numbers[self._names[longest]]
            self._free.append(longest)

    def join(self, account: int, waiting: Collection[int]) -> None:
        """Note that a tenant waits again, beside the `waiting` accounts."""
        others = min((float(self.served[other]) for other in waiting), default=self._last)
        self.served[account] = max(float(self.served[account]), others)

    def leave(self, account: int) -> None:
        """Note that nothing of a tenant waits any more."""
        self._last = float(self.served[account])

    def charge(self, account: int, num_tokens: int) -> None:
        """Count tokens run for a tenant."""
        self.served[account] += num_tokens * self._price[account]

    def charge_many(self, accounts: Int32Array, num_tokens: Int32Array) -> None:
        """Count tokens run for many. Shapes: both [R]."""
        tokens = np.bincount(accounts, weights=num_tokens, minlength=len(self.served))
        self.served += tokens * self._price

    def _new_account(self, tenant: str) -> int:
        if not self._free:
            size = len(self._names)
            more = max(8, size)
            self.served = np.concatenate([self.served, np.zeros(more)])
            self._price = np.concatenate([self._price, np.ones(more)])
            self._names += [""] * more
            self._num_live += [0] * more
            self._free = list(range(size + more - 1, size - 1, -1))
        account = self._free.pop()
        self._names[account] = tenant
        self.served[account] = 0.0
        return account
