"""Worker of the reward model, a frozen Megatron model that scores conversations."""

from __future__ import annotations

from datetime import datetime

import torch

from megarl.batch.data_proto import DataProto
from megarl.config.batch_arithmetic import max_conversation_tokens
from megarl.config.schema import ModelConfig, RewardModelConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import register
from megarl.data.chat_clock import set_chat_time
from megarl.data.conversations import Conversation, ConversationEncoder, conversation_batch
from megarl.data.packing import plan_micro_batches
from megarl.data.tokenizer import decode_rows, load_tokenizer
from megarl.engine.spec import ModelSpec
from megarl.models.architecture import Architecture
from megarl.models.families import read_fields
from megarl.roles.megatron_worker import MegatronWorker


def conversation_encoder(
    config: RewardModelConfig,
    architecture: Architecture,
    chat_time: datetime | None,
    *,
    trust_remote_code: bool,
) -> ConversationEncoder:
    """Return the conversation encoder of a reward model.

    Args:
        chat_time: See TokenRules.

    Raises:
        ValueError: The folder lacks a tokenizer or a chat template.
    """
    assert config.path is not None
    tokenizer = load_tokenizer(config.path, trust_remote_code, key="reward.model.path")
    set_chat_time(tokenizer, chat_time)
    return ConversationEncoder(
        tokenizer,
        vocab_size=architecture.vocab_size,
        pad_token_id=read_fields(config.path).get("pad_token_id"),
        max_length=max_conversation_tokens(config, architecture),
        overlong=config.overlong,
    )


class RewardModelWorker(MegatronWorker):
    """One rank of the reward model.

    Every rank of a replica encodes the same conversations and computes the same plan, so they need not
    communicate.
    """

    def __init__(
        self, spec: ModelSpec, config: RewardModelConfig, policy: ModelConfig, chat_time: datetime | None
    ) -> None:
        super().__init__(spec)
        self._micro_batch = config.micro_batch
        # The policy's tokenizer decodes answers, and the reward model's tokenizer encodes them.
        self._policy_tokenizer = load_tokenizer(policy.path, policy.trust_remote_code)
        self._encoder = conversation_encoder(
            config, spec.architecture, chat_time, trust_remote_code=policy.trust_remote_code
        )

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def score_conversations(self, part: DataProto) -> DataProto:
        """Score conversations.

        Returns:
            `reward_model_scores` (b,) float32 and the bools (b,) `reward_model_truncated`,
            `reward_model_spells_special`. The result is empty on ranks without the last pipeline stage.

        Raises:
            ConversationError: A conversation cannot be built.
        """
        conversations = self._conversations(part)
        scores = self._scores(conversations)

        # Ranks of earlier pipeline stages have no scores to return.
        if scores is None:
            return DataProto()

        return DataProto.from_dict(
            {
                "reward_model_scores": scores,
                "reward_model_truncated": torch.tensor(
                    [conversation.is_truncated for conversation in conversations]
                ),
                "reward_model_spells_special": torch.tensor(
                    [conversation.spells_special for conversation in conversations]
                ),
            }
        )

    def _conversations(self, part: DataProto) -> list[Conversation]:
        # The two models may have different vocabularies, so the answer is converted to text.
        arrays = part.non_tensor_batch
        answers = decode_rows(self._policy_tokenizer, part.ragged["responses"], part.ragged["response_mask"])
        return [
            self._encoder.encode(str(uid), messages, answer)
            for uid, messages, answer in zip(arrays["uid"], arrays["messages"], answers, strict=True)
        ]

    def _scores(self, conversations: list[Conversation]) -> torch.Tensor | None:
        """Return the scores (b,) on the last stage, None elsewhere."""
        parallel = self._spec.parallel

        # The driver cannot plan this: the lengths are known only after encoding.
        plan = plan_micro_batches(
            [len(conversation.token_ids) for conversation in conversations],
            dp_size=1,  # the size of this replica
            sequences=self._micro_batch.sequences,
            max_tokens=self._micro_batch.max_tokens,
            multiple_of=parallel.micro_batch_multiple,
            context_parallel_size=parallel.context_parallel_size,
        )
        (rank,) = plan.ranks
        outputs = self._engine.forward(conversation_batch(conversations, rank.rows), rank.local_micro_batches)
        if outputs is None:
            return None
        return outputs["values"].flat().cpu()[plan.restore_order()]
