"""Every message between processes, one module per link; their sockets, keys and addresses.

A frame is one msgpack array `[tag, *fields]`. Lists of token ids, slots, counts and pages travel
as little-endian int32 bytes (`packing.py`). Times are Unix seconds of the clock that all processes
of a server share (`quadriga/clock.py`). `docs/protocol.md` describes the public link, `client.py`
and `live.py`, for clients in other languages.
"""
