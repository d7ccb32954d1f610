"""The engine as it is served: checks that real servers give the same answers to requests alone and among others.

process.py      a server in a process that ends with this one
replies.py      questions, replies, and clients for gRPC's ensemble and /v1
conditions.py   how questions arrive: one at a time, all at once, staggered
comparison.py   compares replies with those of the condition `alone`, bit for bit
seeds.py        whether draws depend only on the seed
check.py        which conditions on which server, and their results
measures.py, speed.py   speed, compared with the last record
judging.py      the part that the gate judges
table.py        all of it as a table
"""
