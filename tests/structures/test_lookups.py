"""What names led to, and whether they lead there still."""

import pytest

from hf_retrieval_assist.structures.lookups import Lookups


def first():
    return 1


def second():
    return 2


class Base:
    inherited = first


class Kind(Base):
    own = first


def noted(*places):
    found = Lookups()
    for place in places:
        found.add(*place)
    # Classes are looked at name by name once, and by their number from then on.
    assert found.changed() is None
    assert found.changed() is None
    return found


@pytest.mark.parametrize("owner", [Base, Kind])
@pytest.mark.parametrize("name", ["own", "inherited", "absent"])
def test_names_of_a_class(owner, name, monkeypatch):
    found = noted((Kind, "own"), (Kind, "inherited"), (Kind, "absent"))
    concerned = owner is Kind or name != "own"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, second, raising=False)
        for _ in range(2):
            assert found.changed() == (name if concerned else None)
    for _ in range(2):
        assert found.changed() is None


def test_a_name_that_is_noted_when_another_has_changed(monkeypatch):
    found = noted((Kind, "own"))
    monkeypatch.setattr(Kind, "own", second)
    found.add(Kind, "inherited")
    assert found.changed() == "own"


def test_names_of_dictionaries():
    space = {"one": first, "other": second}
    found = noted((space, "one"), (space, "missing"))
    space["other"] = first
    assert found.changed() is None
    space["missing"] = first
    assert found.changed() == "missing"
    del space["missing"], space["one"]
    assert found.changed() == "one"
    assert len(found) == 2
    assert found.items() == [("one", first)]


def test_what_stands_for_another_counts_as_it(monkeypatch):
    def stands():
        return 1

    stands.stands_for = first
    found = noted((Kind, "own"))
    monkeypatch.setattr(Kind, "own", stands)
    assert found.changed() is None
    monkeypatch.setattr(Kind, "own", second)
    assert found.changed() == "own"
