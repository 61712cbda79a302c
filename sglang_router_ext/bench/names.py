"""Names of kernels as people say them. Imports no torch."""

from __future__ import annotations


def short(name: str) -> str:
    """A kernel's name without template arguments, parameters, namespaces and return type."""
    depth, kept = 0, []
    for character in name.replace("(anonymous namespace)::", ""):
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            kept.append(character)
    return "".join(kept).split("::")[-1].split(" ")[-1]
