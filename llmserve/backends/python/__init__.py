"""Backend `python`: `model.py` files with a `TritonPythonModel`, unchanged, each instance in a thread of its own.

    backend.py, parameters.py, complete.py     config, instances
    instance.py, line.py, thread_host.py       in the server: batches to the model, responses back
    process/                                   the same for a model in a process of its own
    host.py, worker.py, batch.py, model_file.py    what holds a model, here or there
    local_server.py, services.py, metric_store.py    what a model may ask of the server
    the rest                                   `triton_python_backend_utils`

A model's process imports from here what it needs and no more, so that it starts quickly.
"""
