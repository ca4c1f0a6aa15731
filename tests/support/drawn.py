"""What a test asks of a figure."""


def title_of(figure) -> str:
    return figure.texts[0].get_text()


def top_of(figure) -> str:
    """The title and the line below it."""
    return "\n".join(text.get_text() for text in figure.texts[:2])


def is_inside(figure) -> bool:
    """Whether all that is drawn, texts included, lies in the picture."""
    figure.draw_without_rendering()  # finds the margins
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
