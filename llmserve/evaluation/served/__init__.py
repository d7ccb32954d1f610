"""An engine as it is served: the same questions through real servers, alone and among others, and the same answers?

process.py      a server of our own, in a process that ends with us
replies.py      a question, what came of it, and who is asked: gRPC's ensemble, or /v1
conditions.py   how questions arrive: one at a time, all at once, staggered
comparison.py   replies beside those of the condition `alone`, to the bit
seeds.py        whether a draw is its seed's, and nobody else's
check.py        which conditions on which server, and what came of them
measures.py, speed.py   how fast that was, beside the last time
judging.py      what of it the gate hears
table.py        all of it, for people
"""
