"""A curve that never has more than so many points. Pure."""

import bisect

__all__ = ["Curve"]

Point = tuple[float, ...]


class Curve:
    """Points by their first number, which mostly grows; thinned evenly when there are many.

    The last point is always kept. A point that comes again replaces the one before.
    """

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self._points: list[Point] = []
        self._every = 1
        self._since = 0

    def add(self, *point: float) -> None:
        """Add a point, or replace the one at the same place."""
        points = self._points
        if points and point[0] <= points[-1][0]:
            place = bisect.bisect_left(points, point[0], key=lambda known: known[0])
            if points[place][0] == point[0]:
                points[place] = point
            elif len(points) < self.limit:
                points.insert(place, point)
            return
        # The last one gives way unless enough have passed since the one before it.
        if points and self._since % self._every:
            points[-1] = point
        else:
            points.append(point)
        self._since += 1
        if len(points) > self.limit:
            last = points[-1]
            points[:] = points[::2]
            self._every *= 2
            self._since = 1
            if points[-1] != last:
                points.append(last)

    def points(self) -> list[Point]:
        """The points that are kept, in order."""
        return list(self._points)

    @property
    def first(self) -> Point | None:
        """The first point, if there is any."""
        return self._points[0] if self._points else None

    @property
    def last(self) -> Point | None:
        """The last point, if there is any."""
        return self._points[-1] if self._points else None
