"""Several processes that speak HTTP before one that has the engines (`--api-workers`).

front process: HTTP, texts, ServerState ─ ProcessClient, RemoteAdmission, RemoteResponses
                                                ║ zmq, msgspec: one pair of sockets for each front process
main process:  Fronts ─ FrontProcess ─ ClientService ─ Router or another engine client
                        the limits of keys, ids that run, stored responses, the sum of all counts
"""
