"""Engines on the machines of a Ray cluster. The only room that knows Ray, which it imports when it is used."""

from inflight.ray_cluster.cluster import RayCluster
from inflight.ray_cluster.shares import ClusterShares

__all__ = ["ClusterShares", "RayCluster"]
