"""`EXECUTION_MODE=process`: a model in its own process, where it can only harm its own requests.

channel.py        messages over a socket, large arrays in shared memory
messages.py       messages between the two sides
host.py           in the server: which requests are sent to the process, wait, or are refused
supervisor.py     the thread that starts the process, and restarts it if it dies
life.py           one such process, and its work
back_off.py       delay before a restart
server_calls.py   the model's requests to the server
guest.py          in the process: the model's substitute for the server
stub.py           main of the process
"""
