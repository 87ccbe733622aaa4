(* The claims on backward chains and LoRA, applied where all their hypotheses hold. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Formulas IdentityPath GradientFlow LoraSmooth Statements.
Open Scope R_scope.

(* chains on R: every branch multiplies by 1/2 *)
Definition half (j : nat) (v : R) : R := / 2 * v.
Lemma half_minus j v w : half j (minus v w) = minus (half j v) (half j w).
Proof. unfold half, minus, plus, opp. simpl. ring. Qed.
Lemma half_bound j (v : R) : norm (half j v) <= / 2 * norm v.
Proof. unfold half, norm. simpl. unfold abs. simpl. rewrite Rabs_mult, (Rabs_pos_eq (/ 2)) by lra. lra. Qed.

Example claim_skip_bias_met :
  norm (minus (chain R_NormedModule half (fun _ => true) 2 1) (chain R_NormedModule half (Nat.eqb 0) 2 1))
    <= (pprod (fun j => 1 + (if true then / 2 else 0)) 2 - pprod (fun j => 1 + (if Nat.eqb 0 j then / 2 else 0)) 2)
       * norm (1 : R_NormedModule).
Proof. apply (claim_skip_bias R_NormedModule half (fun _ => / 2) half_minus half_bound). intros; lra. Qed.

Example claim_identity_bias_met : norm (minus (chain R_NormedModule half (fun _ => true) 2 1) 1)
  <= (pprod (fun j => 1 + / 2) 2 - 1) * norm (1 : R_NormedModule).
Proof. apply (claim_identity_bias R_NormedModule half (fun _ => / 2) half_minus half_bound). intros; lra. Qed.

Example claim_gradient_flow_met : pprod (fun j => 1 - / 2) 2 * norm (1 : R_NormedModule)
  <= norm (chain R_NormedModule half (fun _ => true) 2 1).
Proof. apply (claim_gradient_flow R_NormedModule half (fun _ => / 2) half_bound); intros; lra. Qed.

Example claim_identity_ascends_met : loss 1 (-2) 0 < loss 1 (-2) (0 - 1 / 10 * 1).
Proof. apply claim_identity_ascends; lra. Qed.

(* LoRA with one-by-one factors B = 2, A = 3, Hessian 1, gradient 5, s = 1 *)
Example claim_lora_block_met (X Y : R_NormedModule) :
  (scal 1 (plus (2 * X) (3 * Y))) ^ 2 + 2 * 1 * (5 * (Y * X))
    <= lora_curvature (1 ^ 2 * 1) 3 2 (1 * 5) * (norm X ^ 2 + norm Y ^ 2).
Proof.
  assert (N : forall z : R_NormedModule, norm z = Rabs z) by reflexivity.
  apply (claim_lora_block R_NormedModule R_NormedModule R_NormedModule (fun X => 2 * X) (fun Y => 3 * Y)
    (fun w => w ^ 2) (fun Y X => 5 * (Y * X)) 1 1 3 2 5); try lra; intros; rewrite ?N.
  - rewrite pow2_abs, Rmult_1_l. apply Rle_refl.
  - rewrite Rabs_mult, (Rabs_pos_eq 2) by lra. apply Rle_refl.
  - rewrite Rabs_mult, (Rabs_pos_eq 3) by lra. apply Rle_refl.
  - rewrite !Rabs_mult, (Rabs_pos_eq 5) by lra. apply Rle_refl.
Qed.

Example claim_lora_attained_met : exists u v, u ^ 2 + v ^ 2 = 1 /\ lora_form 1 3 2 5 u v = lora_curvature 1 3 2 5.
Proof. apply claim_lora_attained. Qed.

Example claim_lora_derivative_met : is_derive
  (fun t => 2 * (0 + 1 * ((2 + t * 1) * (3 + t * 1))) * (1 * (1 * (3 + t * 1) + (2 + t * 1) * 1))) 0
  (2 * (1 * (2 * 1 + 1 * 3)) ^ 2 + 2 * 1 * (2 * (0 + 1 * (2 * 3)) * (1 * 1))).
Proof.
  apply (claim_lora_derivative (fun w => w ^ 2) (fun w => 2 * w) (fun _ => 2) 0 1 3 2 1 1);
    intros w; auto_derive; trivial; ring.
Qed.

Example claim_relative_bias_met : norm (minus (1 : R_NormedModule) (chain R_NormedModule half (fun _ => true) 2 1))
  <= (/ pprod (fun j => 1 - / 2) 2 - 1) * norm (chain R_NormedModule half (fun _ => true) 2 1).
Proof. apply (claim_relative_bias R_NormedModule half (fun _ => / 2) half_bound); intros; lra. Qed.

Example claim_lora_simple_met : lora_curvature 1 2 2 5 = lora_curvature_simple 1 2 2 5.
Proof. apply claim_lora_simple; lra. Qed.
