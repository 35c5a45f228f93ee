"""API workers (`--api-workers`): several HTTP processes in front of one process with the engines.

API worker:    HTTP, text processing, ServerState ─ ProcessClient, RemoteAdmission, RemoteResponses
                                                ║ zmq, msgspec: one pair of sockets for each worker
main process:  ApiWorkerPool ─ ApiWorkerProcess ─ ClientService ─ Router or another engine client
                        limits of keys, running request ids, stored responses, the sum of all metrics
"""
