"""The prefix tree in a few numbers: chains of pages merged, within fixed bounds of time and size.

A tree may have a hundred thousand pages. Only so many are looked at in one message, and those that
requests hold come first.
"""

from collections import deque
from heapq import nlargest
from itertools import islice

from quadriga.wire.messages.live import MAX_LIVE_TREE_NODES, LiveTree
from scheduler_proc.state.prefix_tree import Node, PrefixTree

MAX_VISITED_PAGES = 2048
MAX_CHILDREN_SEEN = 512  # of one node
MAX_CHILDREN = 64  # of one node in the summary


def live_tree(tree: PrefixTree) -> LiveTree:
    """Return a summary of the tree, from the root down, level by level."""
    parents: list[int] = []
    num_pages: list[int] = []
    num_holders: list[int] = []
    num_visited = num_shared = 0
    is_whole = True
    queue = deque([(-1, tree.root)])
    while queue:
        place, node = queue.popleft()
        children = _first_children(node)
        is_whole = is_whole and len(children) == len(node.children)
        for child in children:
            if len(parents) >= MAX_LIVE_TREE_NODES or num_visited >= MAX_VISITED_PAGES:
                return LiveTree(parents, num_pages, num_holders, num_shared, False)
            length, last = _chain(child, MAX_VISITED_PAGES - num_visited)
            num_visited += length
            num_shared += length if child.ref_count > 1 else 0
            queue.append((len(parents), last))
            parents.append(place)
            num_pages.append(length)
            num_holders.append(child.ref_count)
    return LiveTree(parents, num_pages, num_holders, num_shared, is_whole)


def _first_children(node: Node) -> list[Node]:
    """Return the children that the summary has: the newest, those with the most holders first."""
    newest = islice(reversed(node.children.values()), MAX_CHILDREN_SEEN)
    return nlargest(MAX_CHILDREN, newest, key=_num_holders)


def _num_holders(node: Node) -> int:
    return node.ref_count


def _chain(node: Node, max_pages: int) -> tuple[int, Node]:
    """Return the number of pages from a node down to the next fork or change, and its last one."""
    length = 1
    while len(node.children) == 1 and length < max_pages:
        (child,) = node.children.values()
        if child.ref_count != node.ref_count:
            break
        node, length = child, length + 1
    return length, node
