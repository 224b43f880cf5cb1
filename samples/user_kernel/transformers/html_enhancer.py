# 注意：此文件必须放在 ral-config.yaml 同级目录的 transformers/ 下
import triton
import triton.language as tl


@triton.jit
def html_enhancer_kernel(
    output_ptr,  # *int8，指向输出buffer首地址
    term_list_ptr,  # *int32，术语ID数组
    term_count,  # int32，术语数量
    BLOCK_SIZE: tl.constexpr,  # 编译时常量，由SDK根据模型上下文长度推导
):
    pid = tl.program_id(axis=0)
    offset = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offset < 2048  # 假设max_seq_len=2048
    tokens = tl.load(output_ptr + offset, mask=mask, other=0)
    # 在GPU上做术语匹配（简化版）
    for i in range(term_count):
        term_id = tl.load(term_list_ptr + i)
        match = tokens == term_id
        # 匹配成功则写入<b>标签的ASCII码（实际更复杂，此处示意）
        tl.store(output_ptr + offset + 1, tl.where(match, 60, 0), mask=match)  # '<'


# SDK会自动调用此kernel，无需你写launch代码
