"""Each verb on plain samples, and beside the package it is named after."""

import random

import numpy as np
import pytest
import torch

import penstock.webdataset as wds
from penstock.errors import ConfigError, SchemaMismatch


def samples(count=10, **fields):
    """Dicts such as shards give."""
    return [{"__key__": f"{number:03d}", "__url__": "x.tar", "cls": number, **fields} for number in range(count)]


def pipeline(source, package=wds):
    """The same samples under either package's verbs."""
    return package.FluidWrapper(lambda: iter([dict(each) if isinstance(each, dict) else each for each in source]))


def plain(value):
    """Values that can be compared with ==, types included."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


PICTURES = samples(jpg=b"j", txt="t")
MIXED = [{"png" if number % 2 else "jpg": number, "cls": number} for number in range(6)]
TUPLES = [(number, f"{number}", np.full(3, number)) for number in range(7)]
TENSORS = [(torch.full((2,), number), number / 2) for number in range(5)]

# Each is a way of saying something, and what it is said about; both packages must give the same.
SAID = {
    "map": (samples(), lambda ds: ds.map(lambda sample: {"twice": 2 * sample["cls"]})),
    "map drops None": (samples(), lambda ds: ds.map(lambda sample: sample if sample["cls"] % 3 else None)),
    "map of numbers": (range(5), lambda ds: ds.map(lambda number: number + 1)),
    "map passing over": (range(5), lambda ds: ds.map(lambda number: 6 // number, handler=wds.ignore_and_continue)),
    "map stopping": (range(-2, 5), lambda ds: ds.map(lambda number: 6 // number, handler=wds.ignore_and_stop)),
    "map_dict": (PICTURES, lambda ds: ds.map_dict(jpg=len, txt=str.upper)),
    "map_dict passing over": (MIXED, lambda ds: ds.map_dict(png=float, handler=wds.ignore_and_continue)),
    "map_tuple": (TUPLES, lambda ds: ds.map_tuple(float, None, np.sum)),
    "map_tuple of more": (TUPLES, lambda ds: ds.map_tuple(float, int, np.sum, len, len)),
    "select": (samples(), lambda ds: ds.select(lambda sample: sample["cls"] % 2)),
    "slice": (range(10), lambda ds: ds.slice(4)),
    "slice of three": (range(10), lambda ds: ds.slice(1, 8, 3)),
    "rename": (MIXED, lambda ds: ds.rename(image="jpg;png", label="cls")),
    "rename by list": (MIXED, lambda ds: ds.rename(image=["png", "jpg"])),
    "rename keeping none": (PICTURES, lambda ds: ds.rename(image="jpg", keep=False)),
    "rename passing over": (MIXED, lambda ds: ds.rename(image="png", handler=wds.ignore_and_continue)),
    "rename_keys": (PICTURES, lambda ds: ds.rename_keys(image="j*", words="*xt")),
    "rename_keys keeping": (PICTURES, lambda ds: ds.rename_keys(("image", "jpg"), keep_unselected=True)),
    "rename_keys not all": (PICTURES, lambda ds: ds.rename_keys(image="jpg", none="x", must_match=False)),
    "rename_keys last first": (PICTURES, lambda ds: ds.rename_keys(("a", "*"), ("b", "jpg"), duplicate_is_error=False)),
    "extract_keys": (PICTURES, lambda ds: ds.extract_keys("*.png;*.jpg", "cls")),
    "extract_keys missing": (PICTURES, lambda ds: ds.extract_keys("png", "cls", ignore_missing=True)),
    "extract_keys several": (PICTURES, lambda ds: ds.extract_keys("*t*", duplicate_is_error=False)),
    "to_tuple": (PICTURES, lambda ds: ds.to_tuple("png;jpg", "cls", "__key__")),
    "to_tuple in one": (PICTURES, lambda ds: ds.to_tuple("png;jpg cls")),
    "to_tuple missing": (MIXED, lambda ds: ds.to_tuple("png", "cls", missing_is_error=False)),
    "to_tuple passing over": (MIXED, lambda ds: ds.to_tuple("png", "cls", handler=wds.ignore_and_continue)),
    "batched": (TUPLES, lambda ds: ds.batched(3)),
    "batched whole only": (TUPLES, lambda ds: ds.batched(3, partial=False)),
    "batched exactly": (range(6), lambda ds: ds.map(lambda number: (number,)).batched(3)),
    "batched dicts": (PICTURES, lambda ds: ds.batched(4)),
    "batched tensors": (TENSORS, lambda ds: ds.batched(2)),
    "batched by hand": (TUPLES, lambda ds: ds.batched(3, collation_fn=len)),
    "batched as they are": (TUPLES, lambda ds: ds.batched(3, collation_fn=None)),
    "unbatched": (TUPLES, lambda ds: ds.batched(3).unbatched()),
    "unbatched dicts": (PICTURES, lambda ds: ds.batched(3).unbatched()),
    "listed": (range(7), lambda ds: ds.listed(3)),
    "unlisted": (range(7), lambda ds: ds.listed(3).unlisted()),
    "compose": (range(7), lambda ds: ds.compose(lambda source: (2 * each for each in source))),
    "shuffle": (range(100), lambda ds: ds.shuffle(20, initial=5, rng=random.Random(1))),
    "shuffle all": (range(100), lambda ds: ds.shuffle(500, initial=500, rng=random.Random(42))),
    "shuffle little": (range(100), lambda ds: ds.shuffle(1, rng=random.Random(42))),
    "shuffle nothing": (range(100), lambda ds: ds.shuffle(0)),
    "repeat": (range(4), lambda ds: ds.repeat(3)),
    "repeat up to": (range(4), lambda ds: ds.repeat(nbatches=6)),
    "with_epoch": (range(4), lambda ds: ds.with_epoch(6)),
    "with_epoch of fewer": (range(4), lambda ds: ds.with_epoch(3)),
}


@pytest.mark.parametrize("said", SAID)
def test_both_packages_give_the_same(said, peer):
    source, say = SAID[said]
    ours, theirs = list(say(pipeline(source))), list(say(pipeline(source, peer)))
    assert plain(ours) == plain(theirs)
    assert ours, "an empty comparison proves nothing"


@pytest.mark.parametrize("said", SAID)
def test_a_pipeline_can_be_gone_over_again(said):
    source, say = SAID[said]
    dataset = say(pipeline(source))
    assert len(list(dataset)) == len(list(dataset)) > 0


# What they mean, without the package.


def test_map():
    mapped = list(pipeline(samples()).map(lambda sample: {"n": sample["cls"]}))
    assert mapped[3] == {"n": 3, "__key__": "003"}


def test_errors_of_a_callers_function_keep_their_type_and_say_where():
    with pytest.raises(ZeroDivisionError) as caught:
        list(pipeline(samples()).map(lambda sample: 1 // (sample["cls"] - 4)))
    assert caught.value.__notes__ == ["in map, at sample '004' of x.tar"]
    with pytest.raises(KeyError) as caught:
        list(pipeline(samples()).map_dict(png=len))
    assert "in map_dict, at sample '000'" in caught.value.__notes__[0]


def test_what_handlers_let_pass_is_counted():
    dataset = pipeline(range(-3, 4)).map(lambda number: 6 // number, handler=wds.ignore_and_continue)
    assert len(list(dataset)) == 6
    assert dataset.skipped == 1
    list(dataset)
    assert dataset.skipped == 2
    assert dataset.map(str).skipped == 0, "another pipeline counts for itself"


def test_missing_fields_are_named():
    for verb in (lambda ds: ds.to_tuple("png;webp", "cls"), lambda ds: ds.rename(image="png;webp")):
        with pytest.raises(
            SchemaMismatch, match=r"sample '000' of x\.tar: didn't find 'png' or 'webp'; its fields are c"
        ):
            list(verb(pipeline(samples())))
        with pytest.raises(ValueError, match="didn't find"):
            list(verb(pipeline(samples())))


def test_to_tuple_and_none():
    source = [{"a": None, "b": 1}]
    with pytest.raises(ValueError, match="is None"):
        list(pipeline(source).to_tuple("a", "b"))
    assert list(pipeline(source).to_tuple("a", "c", missing_is_error=False)) == [(None, None)]
    assert list(pipeline(source).to_tuple("a", "b", none_is_error=False)) == [(None, 1)]


def test_to_dict():
    assert list(pipeline([(1, "a")]).to_dict("number", "letter")) == [{"number": 1, "letter": "a"}]
    assert list(pipeline(samples(1)).to_dict("cls")) == [{"cls": 0}]
    with pytest.raises(SchemaMismatch, match="2 names"):
        list(pipeline([(1, 2, 3)]).to_dict("a", "b"))
    passing = pipeline([(1, 2, 3), (1, 2)]).to_dict("a", "b", handler=wds.ignore_and_continue)
    assert list(passing) == [{"a": 1, "b": 2}]


def test_patterns_that_match_nothing_or_too_much():
    for verb in (
        lambda ds: ds.rename_keys(image="png"),
        lambda ds: ds.rename_keys(both="*"),
        lambda ds: ds.extract_keys("png"),
        lambda ds: ds.extract_keys("*"),
    ):
        with pytest.raises(ValueError, match=r"png|both|match"):
            list(verb(pipeline(PICTURES)))


def test_batches():
    batches = list(pipeline(TUPLES).batched(3))
    numbers, texts, arrays = batches[0]
    assert numbers.tolist() == [0, 1, 2]
    assert texts == ["0", "1", "2"]
    assert arrays.tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert [len(batch[0]) for batch in batches] == [3, 3, 1]
    tensors, halves = next(iter(pipeline(TENSORS).batched(2)))
    assert isinstance(tensors, torch.Tensor)
    assert tensors.tolist() == [[0, 0], [1, 1]]
    assert halves.tolist() == [0, 0.5]
    with pytest.raises(ConfigError, match="batchsize=0"):
        list(pipeline(TUPLES).batched(0))


def test_what_cannot_be_stacked():
    with pytest.raises(SchemaMismatch, match=r"field 'a': values of shape \(2,\) and \(3,\)"):
        list(pipeline([{"a": np.zeros(3)}, {"a": np.zeros(2)}]).batched(2))
    with pytest.raises(SchemaMismatch, match=r"different fields: \(a\), and \(b\) of '7'"):
        list(pipeline([{"a": 1}, {"b": 1, "__key__": "7"}]).batched(2))
    with pytest.raises(SchemaMismatch, match="different fields"):
        list(pipeline([(1, 2), (1,)]).batched(2))


def test_collation_can_leave_things_apart():
    rows = [{"n": 1, "a": np.zeros(2)}, {"n": 2, "a": np.ones(3)}]
    kept = wds.default_collation_fn(rows, combine_tensors=False, combine_scalars=False)
    assert kept["n"] == [1, 2]
    assert [array.shape for array in kept["a"]] == [(2,), (3,)]


def test_unbatched_and_unlisted_want_batches_and_lists():
    for broken in ([7], [{"a": [1], "b": [1, 2]}]):
        with pytest.raises(ValueError, match="unbatched"):
            list(pipeline(broken).unbatched())
    with pytest.raises(ValueError, match="unlisted"):
        list(pipeline([(1, 2)]).unlisted())


def test_shuffling_follows_from_the_seed_and_the_epoch():
    def order(seed=0):
        dataset = wds.DataPipeline(lambda: iter(range(50)), wds.shuffle(20), seed=seed)
        return [list(dataset) for _ in range(3)]

    assert order() == order()
    assert sorted(order()[0]) == list(range(50))
    first, second, third = order()
    assert first != second != third != first
    assert order(1) != order()


def test_a_shuffle_with_its_own_seed():
    def order(seed):
        return list(pipeline(range(50)).shuffle(20, seed=seed))

    assert order(3) == order(3) != order(4)
    with pytest.raises(ConfigError, match="not both"):
        list(pipeline(range(5)).shuffle(2, seed=1, rng=random.Random(1)))


def test_two_shuffles_in_a_row_differ():
    dataset = wds.DataPipeline(lambda: iter(range(50)), wds.shuffle(50, initial=50), wds.shuffle(50, initial=50))
    single = wds.DataPipeline(lambda: iter(range(50)), wds.shuffle(50, initial=50))
    first = list(single)
    assert [first.index(each) for each in first] == list(range(50))
    assert list(dataset) != [first[place] for place in first]


def test_the_buffer_holds_no_more_than_asked():
    taken = []

    def source():
        for number in range(100):
            taken.append(number)
            yield number

    given = 0
    for _ in wds.DataPipeline(source, wds.shuffle(10, initial=4)):
        given += 1
        assert len(taken) - given <= 10
    assert given == 100


def test_rsample():
    assert list(pipeline(range(9)).rsample(1.0)) == list(range(9))
    assert list(pipeline(range(9)).rsample(0.0)) == []
    assert 400 < len(list(pipeline(range(1000)).rsample(0.5))) < 600
    with pytest.raises(ConfigError, match="probability"):
        list(pipeline(range(9)).rsample(1.5))


def test_log_keys(tmp_path):
    log = tmp_path / "keys.txt"
    dataset = pipeline(samples(3)).log_keys(str(log))
    assert len(list(dataset)) == 3
    assert log.read_text() == "0\t0\t0\t000\n1\t0\t0\t001\n2\t0\t0\t002\n"
    list(dataset)
    assert len(log.read_text().splitlines()) == 6
    assert len(list(pipeline(samples(3)).log_keys())) == 3


def test_then():
    def every(source, step, begin=0):
        return (each for place, each in enumerate(source) if place % step == begin)

    assert list(pipeline(range(9)).then(every, 3, begin=1)) == [1, 4, 7]


def test_fields_may_have_any_name():
    names = {"run": 1, "samples": 2, "function": 3, "verb": 4, "f": 5}
    renamed = pipeline([names]).rename(**{name: name for name in names}).map_dict(**dict.fromkeys(names, str))
    assert list(renamed) == [{name: str(value) for name, value in names.items()}]
    assert next(iter(wds.DataPipeline(lambda: [dict(names)], wds.map_dict(run=float))))["run"] == 1.0


def test_what_is_no_function():
    with pytest.raises(ConfigError, match="'x' is not a function"):
        list(pipeline(samples()).map_dict(cls="x"))
    with pytest.raises(ConfigError, match="at least one function"):
        list(pipeline(samples()).map_dict())
