"""`EXECUTION_MODE=process`: a model in a process of its own, so that whatever it does harms only its own requests.

channel.py        messages over a socket, large arrays in shared memory
messages.py       what the two sides say to each other
host.py           in the server: which requests go to the process, which wait, which are refused
supervisor.py     the thread that starts the process, and starts it again when it has died
life.py           one such process, and what it has to do
back_off.py       how soon the next one starts
server_calls.py   what the model asks the server for
guest.py          in the process: what a model has instead of the server
stub.py           the process's main
"""
