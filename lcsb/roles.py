"""Which role each layer has in a step: selected, or idle in one of the backward modes (theory, T7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Role = Literal["selected", "exact", "identity", "mlp", "below"]


def plan_roles(
    backward: str,
    selected: Sequence[int],
    n_layers: int,
    reach_bottom: bool = False,
    grades: Sequence[str | None] | None = None,
) -> list[Role]:
    """The role of each layer at a step.

    Args:
        backward: backward mode.
        selected: selected layers.
        reach_bottom: True if something below layer 0 is trained, so that the gradient must arrive there.
        grades: mode certified: the block's plan. Without one, and where it has no grade, idle layers are exact.

    Returns:
        One role a layer, index 0 nearest to the embedding.
    """
    if not selected:
        raise ValueError("selection: no layer is selected; expected at least one")
    chosen = set(selected)
    lowest = -1 if reach_bottom else min(chosen)
    idle: Role = "exact" if backward in ("full", "certified") else backward  # type: ignore[assignment]
    roles: list[Role] = [
        "selected" if i in chosen else idle if i > lowest else "below" for i in range(n_layers)
    ]
    if grades is None:
        return roles
    return [
        grade if role == "exact" and grade is not None else role  # type: ignore[misc]
        for role, grade in zip(roles, grades, strict=True)
    ]
