"""The read side: `spool-sync` reads a spool and replays it into destinations, each record once. It writes nothing into a run.

One direction: reader -> batch -> destination.write -> proof from the destination -> cursor. A destination never sees files of
the spool; the engine never sees an SDK.
"""
