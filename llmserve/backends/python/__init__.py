"""Backend `python`: unchanged `model.py` files with a `TritonPythonModel`; each instance has its own thread.

    backend.py, parameters.py, complete.py     config, instances
    instance.py, line.py, thread_host.py       in the server: batches to the model, responses back
    process/                                   the same for a model in its own process
    host.py, worker.py, batch.py, model_file.py    what runs a model, in either process
    local_server.py, services.py, metric_store.py    services of the server for models
    the rest                                   `triton_python_backend_utils`

A model's process imports only what it needs from here, so that it starts quickly.
"""
