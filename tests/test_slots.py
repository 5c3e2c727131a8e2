import numpy as np

from t1jax.slots import Request, SlotTable


def request(trial, tokens, experts_start=0):
    return Request(trial, 0, np.array(tokens, np.int32), experts_start, 8, None, 0.0)


def make_table(*requests, slots=4, rows=2):
    table = SlotTable(slots, rows, buckets=(4, 16), patience=3)
    table.waiting.extend(requests)
    table.admit()
    return table


def trials(slots):
    return [slot.request.trial for slot in slots]


def read_and_leave(table, slot):
    table.start_decoding(slot)
    slot.tokens = slot.request.tokens
    table.leave(slot)


def test_the_oldest_get_the_slots_and_keep_them_until_their_release():
    table = make_table(*(request(trial, [1]) for trial in range(3)), slots=2)
    assert trials(table.reading) == [0, 1] and [r.trial for r in table.waiting] == [2]
    first = table.reading[0]
    read_and_leave(table, first)
    table.admit()
    assert trials(table.reading) == [1]  # trial 0 is between two turns
    table.waiting.append(request(0, [1, 5], experts_start=1))
    table.admit()
    assert trials(table.reading) == [1, 0] and table.reading[1] is first and first.read == 1
    table.release(0)  # while its request is served
    table.admit()
    assert trials(table.reading) == [1, 0]
    read_and_leave(table, first)
    table.admit()
    assert trials(table.reading) == [1, 2] and table.reading[1].read == 0


def test_a_call_is_filled_with_one_bucket_or_made_after_a_while():
    table = make_table(request(0, [1] * 9), request(1, [1]), request(2, [1] * 7), request(3, [1]))
    assert trials(table.next_group(hurry=False)) == [0, 2]
    table.start_decoding(table.reading[0])
    assert trials(table.next_group(hurry=False)) == [1, 3]
    table.start_decoding(table.reading[0])
    assert table.next_group(hurry=False) == []
    assert trials(table.next_group(hurry=True)) == [2]
    table.reading[1].request.waited = 3
    assert trials(table.next_group(hurry=False)) == [3]


def test_a_stream_longer_than_the_buckets_is_cut():
    table = make_table(request(0, range(21)))
    (slot,) = table.reading
    assert table.bucket(slot) == 16
    slot.tokens = slot.request.tokens[:16]
    assert table.bucket(slot) == 16 and slot.piece.tolist() == [16, 17, 18, 19, 20]
    slot.tokens = slot.request.tokens[:17]
    assert table.bucket(slot) == 4


def next_turn(tokens, experts_start=4):
    """The first row and drift of a turn after a slot has read 1 2 3 4."""
    table = make_table(request(0, [1, 2, 3, 4]))
    read_and_leave(table, table.reading[0])
    table.waiting.append(request(0, tokens, experts_start))
    table.admit()
    return table.reading[0].request.first_row, table.rewritten


def test_what_was_read_is_reused_only_where_the_stream_goes_on():
    assert next_turn([1, 2, 3, 4, 5]) == (4, 0)
    assert next_turn([1, 2, 3, 4, 5], experts_start=3) == (0, 0)
    assert next_turn([1, 2, 9, 4, 5]) == (0, 2)
    assert next_turn([1, 2, 3]) == (0, 1)
    assert next_turn([1, 2, 3, 4]) == (0, 0)  # nothing new to read


def test_cancelled_requests_leave_and_their_slots_are_free():
    a, b, c = (request(trial, [1]) for trial in range(3))
    table = make_table(a, b, c, slots=1)
    a.cancelled = b.cancelled = True
    table.admit()
    assert table.requests() == [c] and trials(table.reading) == [2]
    table.release_all()
    c.cancelled = True
    table.admit()
    table.waiting.append(request(3, [1]))
    table.admit()
    assert trials(table.reading) == [3]
