"""A resources server of NeMo Gym that rewards the digit 7."""

from __future__ import annotations

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class SevensResponse(BaseVerifyResponse):
    length: int


class SevensServer(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> SevensResponse:
        parts = [part for item in body.response.output if item.type == "message" for part in item.content]
        text = "".join(part.text for part in parts)
        return SevensResponse(**body.model_dump(), reward=text.count("7") / 4, length=len(text))
