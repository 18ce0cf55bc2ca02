"""Ways to write to a tensor, of which only the first raises its version."""

from __future__ import annotations

WRITES = {
    "in-place": lambda x, new: x.copy_(new),
    "through-data": lambda x, new: x.data.copy_(new),
    "other-data": lambda x, new: setattr(x, "data", new),
    "through-detach-of-data": lambda x, new: x.data.detach().view(-1).copy_(new.view(-1)),
}
