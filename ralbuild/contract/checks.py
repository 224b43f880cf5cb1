"""Checksums: what must hold of the characters of a card number or an IBAN besides their form."""

from __future__ import annotations

from ralbuild.contract.transducer_table import LUHN, MOD_97


def holds(check: int, text: bytes) -> bool:
    """Tell whether the checksum of a kind holds: Luhn (ISO/IEC 7812-1) or mod 97 (ISO 13616)."""
    if check == LUHN:
        digits = [byte - 48 for byte in reversed(text) if 48 <= byte <= 57]
        return (sum(digits[::2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])) % 10 == 0
    if check == MOD_97:
        turned = (text[4:] + text[:4]).decode("ascii", "replace")
        number = "".join(str(int(char, 36)) for char in turned if char.isascii() and char.isalnum())
        return bool(number) and int(number) % 97 == 1
    return True
