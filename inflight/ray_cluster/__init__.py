"""Engines on the machines of a Ray cluster. The only room that knows Ray, which it imports when it is used."""

from inflight.ray_cluster.cluster import ClusterShares, RayCluster

__all__ = ["ClusterShares", "RayCluster"]
