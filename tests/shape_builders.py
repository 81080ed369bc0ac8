"""A picture that tests start from."""

from sampling.shapes import PictureSpec

CENTRED = PictureSpec(
    width_px=96,
    height_px=64,
    shape="circle",
    colour="red",
    background="blue",
    pattern="plain",
    size="medium",
    place="centre",
    radius=0.25,
    centre=(0.5, 0.5),
)
