"""Messages between two processes of this host, by each link, beside gloo alone and one memcpy.

`settings` what is asked, `ways` the ways that a message can go, `benchmark` the two processes; `table` and `picture`
show the sections, which are those of every benchmark (`avgpipe.bench.result`).
"""
