"""Every message between processes, one module per link.

A frame is one msgpack array `[tag, *fields]`. Lists of token ids, slots, counts and pages travel
as little-endian int32 bytes (`arrays.py`). Times are Unix seconds of the clock that all processes
of a server share (`quadriga/clock.py`). `docs/protocol.md` describes the public link for clients in
other languages.
"""
