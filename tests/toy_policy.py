"""A policy small enough to list all it can write: three tokens from {0, 1, 2}, so that expectations are exact."""

from itertools import product

import torch


class Toy:
    """Every completion and its states; with end=2 the token 2 ends one early, so that lengths are 1, 2 and 3.

    ids, mask, states: (N, 3), N = 27, or 15 with an end. A state is the number of a prefix; a policy is its logits
    (S, 3), one row a state.
    """

    def __init__(self, end=None):
        rows = {self._cut(tokens, end) for tokens in product(range(3), repeat=3)}
        self.completions = sorted(rows)
        prefixes = sorted({row[:t] for row in rows for t in range(len(row))})
        self.n, self.n_states = len(rows), len(prefixes)
        self.ids, self.mask, self.states = (
            torch.zeros(self.n, 3, dtype=torch.long) for _ in range(3)
        )
        for i, row in enumerate(self.completions):
            for t, token in enumerate(row):
                self.ids[i, t], self.mask[i, t], self.states[i, t] = (
                    token,
                    1,
                    prefixes.index(row[:t]),
                )
        self.lengths = self.mask.sum(1)

    @staticmethod
    def _cut(tokens, end):
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens

    def logits(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(
            self.n_states, 3, dtype=torch.float64, generator=generator
        ).requires_grad_()

    def rewards(self, seed=9):
        return torch.rand(
            self.n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )

    def logprobs(self, logits):
        """(N, 3), 0 behind the end."""
        return torch.log_softmax(logits, dim=-1)[self.states, self.ids] * self.mask

    def probabilities(self, logits):
        """(N,), of whole completions."""
        return self.logprobs(logits).sum(1).exp()

    def logits_of(self, probabilities):
        """The policy with these probabilities (N,) of whole completions."""
        mass = torch.zeros(self.n_states, 3, dtype=torch.float64)
        for t in range(3):
            inside = self.mask[:, t] == 1
            index = (self.states[inside, t], self.ids[inside, t])
            mass.index_put_(index, probabilities[inside], accumulate=True)
        return mass.log().requires_grad_()

    def state_values(self, logits, rewards):
        """(S,): the expected reward from each state on; and (S, 3) with each token taken."""
        p = self.probabilities(logits).detach()
        reached, gained = (torch.zeros(self.n_states, 3, dtype=torch.float64) for _ in range(2))
        for t in range(3):
            inside = self.mask[:, t] == 1
            index = (self.states[inside, t], self.ids[inside, t])
            reached.index_put_(index, p[inside], accumulate=True)
            gained.index_put_(index, (p * rewards)[inside], accumulate=True)
        return gained.sum(1) / reached.sum(1), gained / reached


def gradient(scalar, logits):
    return torch.autograd.grad(scalar, logits, retain_graph=True)[0]


def policy_gradient(toy, logits, rewards):
    """Of the expected reward, exactly."""
    return gradient((toy.probabilities(logits) * rewards).sum(), logits)


def expected_gradient(toy, logits, size, loss, *, drawn_from=None):
    """Of loss(rows) over all N^size groups of completions, each with its probability, which is held fixed."""
    p = toy.probabilities(logits if drawn_from is None else drawn_from).detach()
    total = 0.0
    for rows in product(range(toy.n), repeat=size):
        rows = torch.tensor(rows)
        total = total + p[rows].prod() * loss(rows)
    return gradient(total, logits)
