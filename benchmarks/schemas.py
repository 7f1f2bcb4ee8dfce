"""JSON schemas of three sizes: records as programs ask models for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

SIZES = {"small": 3, "medium": 8, "large": 20}
"""Name -> members of an object."""

_TEXTS = [
    "name",
    "title",
    "description",
    "city",
    "country",
    "street",
    "postal_code",
    "email",
    "phone_number",
    "comment",
    "author",
    "publisher",
    "language",
    "department",
    "manufacturer",
    "model_number",
    "serial_number",
    "contact_person",
    "reason",
    "subject",
    "nickname",
    "occupation",
    "place_of_birth",
    "invoice_number",
    "customer_identifier",
]
_NUMBERS = [
    "age",
    "quantity",
    "price",
    "weight_in_grams",
    "floor",
    "rating",
    "year",
    "duration_minutes",
    "temperature",
    "number_of_pages",
    "seats",
    "discount_percent",
    "distance_km",
    "stock_level",
    "priority",
]
_FLAGS = [
    "active",
    "verified",
    "is_gift",
    "in_stock",
    "requires_signature",
    "newsletter",
    "accessible",
    "confidential",
    "refundable",
    "archived",
]
_CHOICES = {
    "color": ["red", "green", "blue", "black"],
    "status": ["pending", "in_progress", "completed", "cancelled"],
    "payment_method": ["credit_card", "bank_transfer", "cash_on_delivery"],
    "size": ["small", "medium", "large", "extra_large"],
    "severity": ["low", "normal", "high", "critical"],
    "unit": ["piece", "kilogram", "litre", "metre"],
    "weekday": ["monday", "wednesday", "friday", "sunday"],
    "visibility": ["public", "internal", "private"],
}
_THINGS = [
    "customer",
    "order",
    "book",
    "patient",
    "recipe",
    "flight",
    "ticket",
    "employee",
    "product",
    "event",
    "building",
    "invoice",
    "song",
    "vehicle",
    "student",
    "parcel",
    "hotel",
    "course",
    "animal",
    "contract",
]


class Asked(NamedTuple):
    """What a model is asked for."""

    size: str
    prompt: str
    schema: dict[str, Any]


def schemas(size: str, count: int, seed: int) -> Iterator[Asked]:
    """Schemas of a size, the same ones for the same seed."""
    rng = random.Random(f"{size} {seed}")
    for number in range(count):
        thing = _THINGS[number % len(_THINGS)]
        yield Asked(
            size, f"A {thing} as JSON:\n", _record(SIZES[size], rng, nested=size != "small")
        )


def _record(members: int, rng: random.Random, nested: bool) -> dict[str, Any]:
    """An object, with objects and arrays of objects among its members where it is nested."""
    names = rng.sample([*_TEXTS, *_NUMBERS, *_FLAGS, *_CHOICES], members)
    properties = {name: _member(name) for name in names}
    if nested:
        for name in names[2::5]:
            inner = _record(3, rng, nested=False)
            several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
            properties[f"{name}_details"] = inner if rng.random() < 0.5 else several
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _member(name: str) -> dict[str, Any]:
    if name in _CHOICES:
        return {"enum": _CHOICES[name]}
    if name in _FLAGS:
        return {"type": "boolean"}
    if name in _NUMBERS:
        return {"type": "integer", "minimum": 0, "maximum": 9999}
    return {"type": "string", "maxLength": 16}
