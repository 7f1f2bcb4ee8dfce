"""Whose a request is: what each tenant drafts from, and what an erasure reaches."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from hf_retrieval_assist.extensions.serving.refusals import RefusedError
from hf_retrieval_assist.extensions.serving.tenants import Tenants, read_keys
from hf_retrieval_assist.extensions.serving.workers import OneByOne
from tests.support.memories import wait_until
from tests.support.served import ANSWERS, get, health, posted, serving, tenancy, text_of


def erased(served, name, **headers):
    """The status and the answer to an order to erase a tenant."""
    status, text = get(f"{served.url}/tenants/{name}", method="DELETE", **headers)
    return status, json.loads(text)


ADMIN = {"authorization": "Bearer all"}


@pytest.mark.parametrize("by", ["key", "header"])
def test_tenants_draft_from_their_own_outputs_alone(folder, by):
    by_header = {name: {"x-tenant": name} for name in ("acme", "globex")}
    by_key = {name: {"authorization": f"Bearer {name} key"} for name in by_header}
    keys = {"header": None, "keys": {f"{name} key": name for name in by_key}}
    memory, made, tenants = tenancy(**(keys if by == "key" else {}))
    headers = by_key if by == "key" else by_header
    with serving(folder, tenants=tenants) as served:
        for name in ("acme", "globex", "acme"):
            status, answer = posted(served, headers=headers[name])
            assert (status, text_of(answer)) == (200, ANSWERS["hello"])
        assert len(made) == 2
        assert [len(memory.namespace(name)) for name in headers] == [2, 1]
        status, answer = posted(served, headers={"authorization": "Bearer nobody's"})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert erased(served, "acme", authorization="Bearer acme key")[0] == 403
        assert erased(served, "acme")[0] == 401
        assert len(memory.namespace("acme")) == 2
        assert erased(served, "acme", **ADMIN) == (200, {"tenant": "acme", "erased": 2})
        assert [len(memory.namespace(name)) for name in headers] == [0, 1]
        posted(served, headers=headers["acme"])
        assert len(made) == 3  # what the first one had learnt is gone with it


@pytest.fixture(scope="module")
def tenants_served(folder):
    memory, _, tenants = tenancy(keys={"k": "known"})
    with serving(folder, tenants=tenants) as found:
        yield found, memory


# The name of a tenant, and how headers spell it.
NAMES = [
    ("Zoë", ["Zoë".encode().decode("latin-1"), "Zo%C3%AB", "Zo\u00eb"]),
    ("team/a", ["team/a", "team%2Fa"]),
    ("100%", ["100%", "100%25"]),
    ("日本", ["日本".encode().decode("latin-1"), "%E6%97%A5%E6%9C%AC"]),
    ("..", [".."]),
    ("a b?c#d", ["a b?c#d", "a%20b%3Fc%23d"]),
]


@pytest.mark.parametrize(("name", "spelt"), NAMES, ids=str)
def test_a_tenant_is_the_same_in_a_header_and_in_a_path(tenants_served, name, spelt):
    served, memory = tenants_served
    for value in spelt:
        assert posted(served, headers={"x-tenant": value})[0] == 200
    assert len(memory.namespace(name)) == len(spelt)
    path = quote(name, safe="").replace(".", "%2E")
    assert erased(served, path, **ADMIN) == (200, {"tenant": name, "erased": len(spelt)})
    assert not len(memory.namespace(name))
    assert erased(served, path, **ADMIN)[0] == 404


@pytest.mark.parametrize("name", ["nobody", "Zo%C3%83%C2%AB", "", "acme/", "%FF"])
def test_who_is_nobody_is_not_erased(tenants_served, name):
    served, memory = tenants_served
    assert posted(served, headers={"x-tenant": "acme"})[0] == 200
    status, answer = erased(served, name, **ADMIN)
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert len(memory.namespace("acme"))


@pytest.mark.parametrize("name", ["a%FF", "a%0Ab"])
def test_names_that_no_path_has_are_refused(tenants_served, name):
    status, answer = posted(tenants_served[0], headers={"x-tenant": name})
    assert (status, answer["error"]["code"]) == (400, "invalid_value")


def test_keys_may_be_of_any_letters():
    tenants = Tenants(lambda name: None, lambda name: 3, keys={"schlüssel": "acme"}, admin_key="ä")
    read = {key: f"Bearer {key}".encode().decode("latin-1") for key in ("schlüssel", "ä")}
    assert tenants.of({"authorization": read["schlüssel"]}) == "acme"
    assert tenants.erase("acme", {"authorization": read["ä"]}) == 3
    with pytest.raises(RefusedError):
        tenants.erase("acme", {"authorization": read["schlüssel"]})


def test_keys_of_tenants_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# whose\nacme k1\n\nglobex k2\nacme k3\n")
    assert read_keys(path) == {"k1": "acme", "k2": "globex", "k3": "acme"}
    for text in ("", "acme\n", "acme k1\nglobex k1\n", "a b c\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a tenant's name and"):
            read_keys(path)


def test_an_erasure_reaches_requests_that_wait(folder, monkeypatch):
    """Nothing is learnt any more of what was asked before it."""
    memory, _, tenants = tenancy()
    acme = {"headers": {"x-tenant": "acme"}}
    going, generate = threading.Event(), OneByOne._generate
    going.set()
    monkeypatch.setattr(OneByOne, "_generate", lambda *x: going.wait(30) and generate(*x))
    with serving(folder, tenants=tenants) as served, ThreadPoolExecutor(4) as clients:
        assert posted(served, **acme)[0] == 200
        assert len(memory.namespace("acme")) == 1
        going.clear()
        prediction = {"type": "content", "content": "hello"}
        options = [{}, {}, {"prediction": prediction}, {"n": 2}]
        asked = [clients.submit(posted, served, **acme, **one) for one in options]
        wait_until(lambda: health(served)[1]["waiting"] == len(served.service.worker._waiting) == 4)
        assert erased(served, "acme", **ADMIN)[1]["erased"] == 1
        going.set()
        assert {text_of(one.result()[1]) for one in asked} == {ANSWERS["hello"]}
        assert len(memory.namespace("acme")) == 0
        assert posted(served, **acme)[0] == 200
        assert len(memory.namespace("acme")) == 1


def test_an_erasure_that_others_could_not_be_told_is_no_success():
    def fail(name):
        raise OSError("the file at /full")

    tenants = Tenants(lambda name: None, fail, header="x", admin_key="all")
    with pytest.raises(RefusedError, match="this process has forgotten 'acme'") as found:
        tenants.erase("acme", ADMIN)
    assert found.value.status == 500
