"""What GPTQ is calibrated on: a file, the text of lm-eval tasks, or Python's own documentation."""

from pathlib import Path

from cli.common import english_text


def calibration_text(file: str | None, tasks: list[str], include_path: str | None = None) -> str:
    """A file's text, that of lm-eval tasks, or Python's own documentation."""
    if file:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file}: not UTF-8 text") from None
        if not text.strip():
            raise ValueError(f"{file}: no text to calibrate on")
        return text
    return "\n\n".join(task_texts(tasks, include_path)) if tasks else english_text()


def task_texts(names: list[str], include_path: str | None):
    """Questions with their right answers, from the training split where there is one."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ImportError("--calibration_tasks needs: pip install lm-eval") from None
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-eval has no task {', '.join(unknown)}")
    try:
        tasks = manager.load(names)["tasks"].values()
    except Exception as e:                         # its datasets library has kinds of its own
        raise OSError(f"the data of {', '.join(names)} cannot be had: "
                      f"{(str(e).splitlines() or [type(e).__name__])[0][:160]}") from None
    for task in tasks:
        for doc in task.training_docs() if task.has_training_docs() else task.eval_docs:
            target = task.doc_to_target(doc)
            if isinstance(target, int):
                target = task.doc_to_choice(doc)[target]
            target = target[0] if isinstance(target, list) else target
            question = task.doc_to_text(doc)
            yield f"{question}{task.config.target_delimiter if question else ''}{target}"
