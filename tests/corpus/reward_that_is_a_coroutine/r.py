import asyncio


class Asks:
    async def __call__(self, response):
        await asyncio.sleep(0)
        return 1.0


f = Asks()
