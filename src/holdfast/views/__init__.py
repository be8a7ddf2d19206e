"""Views of a run's event logs: terminal, web page, report, Prometheus.

    told, curve, members, faults → picture → snapshot    pure: what the logs tell
    tail                                                 follows the files of a run's folder
    lines, drawing, terminal; page, web, report          what people see
    writers                                              for TensorBoard

A view only reads. It needs none of the parts that write the events: what it shows of an
event it looks up by the event's type, and what it does not know it counts and lists.
"""
