"""Several servers of one model on one machine, behind somebody else's gateway (`smg`): `stretto serve --replicas N`.

    clients --> gateway --+--> replica 0: server, engine, its GPUs or cores
    (--port)              +--> replica 1: ...
                 fleet: starts them, tells the gateway who is ready, starts again what dies, ends all

`placement` says where each runs, `gateway` is the gateway's command and its control interface, `fleet` the life of all,
`tether` the start of each process. No torch in this package, and no routing: that is the gateway's.
"""
