"""Characters as keys of an American keyboard, by QEMU's names (QKeyCode of qapi/ui.json). Pure."""

from __future__ import annotations

import string

from libdsec.errors import InvalidArgument

SHIFT = "shift"
_PLAIN = {
    " ": "spc", "\n": "ret", "\t": "tab", "-": "minus", "=": "equal", "[": "bracket_left",
    "]": "bracket_right", "\\": "backslash", ";": "semicolon", "'": "apostrophe",
    "`": "grave_accent", ",": "comma", ".": "dot", "/": "slash",
    **{character: character for character in string.ascii_lowercase + string.digits},
}  # fmt: skip
_SHIFTED = dict(zip('!@#$%^&*()_+{}|:"~<>?', "1234567890-=[]\\;'`,./", strict=True))
_NAMES = {"enter": "ret", "escape": "esc", "space": "spc", "super": "meta_l", "del": "delete"}
_KEYS = frozenset(
    (
        *_PLAIN.values(), *(f"f{number}" for number in range(1, 13)),
        "shift", "shift_r", "ctrl", "ctrl_r", "alt", "alt_r", "meta_l", "meta_r", "menu",
        "esc", "backspace", "caps_lock", "num_lock", "scroll_lock", "print", "sysrq", "pause",
        "insert", "delete", "home", "end", "pgup", "pgdn", "up", "down", "left", "right",
    )
)  # fmt: skip


def keys_of(character: str) -> tuple[str, ...]:
    """Return the keys that make `character`, as they go down. Raises `InvalidArgument`."""
    if character in _PLAIN:
        return (_PLAIN[character],)
    if character in _SHIFTED:
        return SHIFT, _PLAIN[_SHIFTED[character]]
    if character in string.ascii_uppercase:
        return SHIFT, character.lower()
    raise InvalidArgument(
        f"text: {character!r} is on no American keyboard: put it into a file, or the clipboard",
        field="text",
    )


def key_named(name: str) -> str:
    """Return the key that `name` means: a character or a name. Raises `InvalidArgument`."""
    known = _PLAIN.get(name) or _NAMES.get(name.lower(), name.lower())
    if known not in _KEYS:
        raise InvalidArgument(f"keys: {name!r} is no key", field="keys")
    return known
